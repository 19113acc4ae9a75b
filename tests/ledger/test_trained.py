"""Models under the Trainer, called as users call them."""

import gc

import pytest
import torch

from benchmarks.ledger.trained import CASES, measure
from tests.ledger.budgets import TRAINED


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=[pytest.mark.rehearsed] if name == "fp8-hybrid-8bit" else [])
        for model, name in TRAINED
    ],
)
def test_a_step_asks_for_no_more_than_its_budget(model, name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # the null GPU has none
    gc.unfreeze()  # what other files have left counts in the peak
    gc.collect()
    found, budget = measure(CASES[model](), name), TRAINED[model, name]
    assert (found.waits, found.refused, found.loose) == ([], [], [])
    assert found.graphs == budget.graphs  # equal blocks share one; those of torch's encoder are compiled in two
    assert found.kernels <= budget.kernels
    assert round(found.block_bytes / 1e9, 2) <= budget.block_gb
    assert round(found.outside_bytes / 1e9, 1) <= budget.outside_gb
    assert round(found.peak / 1e9, 1) <= budget.peak_gb
