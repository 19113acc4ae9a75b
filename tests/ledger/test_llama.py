"""A Llama of transformers under the Trainer, called as users call it, with the sizes of the 8B stack."""

import gc

import pytest

from benchmarks.ledger.llama import measure
from tests.ledger.budgets import LLAMA
from tests.ledger.counted import STACK


@pytest.mark.parametrize(
    "name", ["bf16-mixed", "fp8-hybrid", pytest.param("fp8-hybrid-8bit", marks=pytest.mark.rehearsed)]
)
def test_a_step_asks_for_no_more_than_its_budget(name):
    gc.unfreeze()  # what other files have left counts in the peak
    gc.collect()
    found, budget = measure(STACK, precision=name), LLAMA[name]
    assert (found.waits, found.refused, found.loose) == ([], [], [])
    assert found.graphs == (0 if name == "bf16-mixed" else 1)  # all blocks share one
    assert found.kernels <= budget.kernels
    assert round(found.block_bytes / 1e9, 2) <= budget.block_gb
    assert round(found.outside_bytes / 1e9, 1) <= budget.outside_gb
    assert round(found.peak / 1e9, 1) <= budget.peak_gb
