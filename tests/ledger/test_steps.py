"""A training step at full size: no more than the same code by hand asks for, nothing that waits, within budgets."""

import gc
import json
from pathlib import Path

import pytest
import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from benchmarks.ledger import roofline
from benchmarks.ledger.entry import PHASES, Entry
from benchmarks.ledger.trained import CASES, measure
from tests.ledger.budgets import BLOCK_GB, OPTIMIZER_BYTES, PEAK_GB, PYTHON_CALLS, TRAINED
from tests.ledger.counted import STACK, entry

COMPILED = ("ours fp8-hybrid", "ours fp8-rowwise", "ours fp8-rowwise-gw-hp")
BY_HAND = {"ours current, as by hand": "te current", "ours block, as by hand": "te block"}
FABRIC_CALLS = 100
"""Python calls per step of Fabric's wrappers and of our hooks in them."""
UPDATE_OF_SCALES = ("amax_and_scale_update", "nan_to_num", "CatArrayBatchedCopy", "ForeachBinaryOpList")
"""Kernels of delayed scaling's update, which ours runs after the optimizer, without amaxes that are not finite."""
EVERYONE = sorted({*BLOCK_GB, *OPTIMIZER_BYTES, *PEAK_GB, *PYTHON_CALLS})
REHEARSED = {
    "ours fp8-rowwise-gw-hp",
    "torchao rowwise_with_gw_hp, compiled",
    "ours fp8-hybrid, codes per GEMM",
    "ours fp8-hybrid-te, blocks compiled",
}
"""The defaults of fp8-hybrid, fp8-rowwise and fp8-hybrid-te stand for them."""
LEDGER = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("null-gpu-*/ledger.json"))[-1]
COMMITTED = {
    row["contender"]: Entry.from_json({**row, "kernels": []}) for row in json.loads(LEDGER.read_text())["entries"]
}
"""The newest ledger of benchmarks/results, which the docs show."""


def with_marks(contenders):
    return [pytest.param(one, marks=pytest.mark.rehearsed if one in REHEARSED else ()) for one in contenders]


@pytest.mark.parametrize("ours", BY_HAND)
def test_ours_launches_what_the_same_code_by_hand_launches(ours):
    """The whole step: kernels by name and products by shape, format, layout and flags, in order."""
    assert entry(ours).kernels == entry(BY_HAND[ours]).kernels


TORCHAO = {
    "ours fp8-hybrid": "torchao tensorwise, compiled",
    "ours fp8-hybrid, codes per GEMM": "torchao tensorwise, compiled",
    "ours fp8-rowwise": "torchao rowwise, compiled",
    "ours fp8-rowwise-gw-hp": "torchao rowwise_with_gw_hp, compiled",
}


@pytest.mark.parametrize("name", with_marks(TORCHAO))
def test_our_products_ask_for_no_more_than_raw_torchao(name):
    """With one scale the products of a backward run in another order, and those of weights write float32."""
    ours, by_hand = entry(name), entry(TORCHAO[name])
    of_ours, of_theirs = ([k for k in e.kernels if k.startswith("cublasLt")] for e in (ours, by_hand))
    in_float32 = sum("c=float32" in k for k in of_ours)
    assert in_float32 == (7 * STACK.layers if "tensorwise" in TORCHAO[name] else 0)
    assert sorted(k.replace("c=float32", "c=bfloat16") for k in of_ours) == sorted(of_theirs)
    assert len(of_ours) >= 2 * 7 * STACK.layers, "the products were not found"
    assert len(ours.kernels) <= len(by_hand.kernels)
    assert ours.whole().product_flops == by_hand.whole().product_flops
    assert ours.whole().products == by_hand.whole().products
    assert ours.whole().bytes <= by_hand.whole().bytes


def test_delayed_scaling_differs_by_the_update_of_its_scales_only():
    ours, by_hand = (
        [name for name in entry(who).kernels if not any(part in name for part in UPDATE_OF_SCALES)]
        for who in ("ours delayed, as by hand", "te delayed")
    )
    assert ours == by_hand
    assert len(entry("ours delayed, as by hand").kernels) <= len(entry("te delayed").kernels) + 6
    FP8GlobalStateManager.reset()  # the scales of these models are not renewed in the steps of later tests


@pytest.mark.parametrize(("name", "recipe"), [("fp8-hybrid", "tensorwise"), ("fp8-rowwise", "rowwise")])
def test_the_host_calls_no_more_python_per_block_than_raw_torchao(name, recipe):
    """Fabric calls some functions per step; `python -m benchmarks.host_overhead` has the times."""
    ours, by_hand = entry(f"ours {name}"), entry(f"torchao {recipe}, compiled")
    assert 0 < ours.python_calls <= by_hand.python_calls + FABRIC_CALLS


@pytest.mark.parametrize("contender", with_marks([*COMPILED, "ours msamp-o2"]))
def test_blocks_compile_into_one_graph_without_a_break(contender):
    found = entry(contender)
    optimizer = 2 if contender == "ours msamp-o2" else 0  # its step has two passes
    assert (found.graphs, found.graph_breaks) == (1 + optimizer, {})
    blocks = {found.stretches["backward"][str(index)].kernels for index in range(1, STACK.layers - 1)}
    assert len(blocks) == 1  # every block runs the same code


@pytest.mark.parametrize("contender", with_marks(EVERYONE))
def test_a_step_stays_within_its_budgets(contender):
    found = entry(contender)
    assert (found.waits, found.refused, found.loose, found.mallocs) == ([], [], {}, 0)
    counted = (
        (BLOCK_GB, lambda: found.per_block("bytes") / 1e9),
        (OPTIMIZER_BYTES, lambda: found.phase("optimizer").bytes / found.parameters),
        (PEAK_GB, lambda: found.peak / 1e9),
        (PYTHON_CALLS, lambda: found.python_calls),
    )
    for budget, figure in counted:
        if contender in budget:
            assert 0 < figure() <= budget[contender], figure


PREDICTED = [
    ("ours fp8-hybrid-8bit, fp8 head", "lightning bf16-mixed, compiled, chunked loss", 1.52),
    ("ours fp8-hybrid-remainder, fp8 head", "lightning bf16-mixed, compiled, chunked loss", 1.44),
    ("ours fp8-hybrid-remainder, fp8 head", "lightning bf16-true, compiled, chunked loss", 1.33),
    ("ours fp8-hybrid-remainder, chunked loss", "lightning bf16-mixed, compiled, chunked loss", 1.36),
]


@pytest.mark.parametrize(("ours", "over", "least"), PREDICTED)
def test_what_the_roofline_predicts(ours, over, least):
    """With the middle rates, over bf16 that has the same loss; another set of rates moves ratios by a few percent."""
    rates = roofline.assumed("middle")
    assert roofline.predict(entry(over), rates).total / roofline.predict(entry(ours), rates).total >= least


COUNTED_HERE = {*EVERYONE, *TORCHAO.values(), *BY_HAND.values(), *(key for pair in PREDICTED for key in pair[:2])}


@pytest.mark.parametrize("contender", with_marks(sorted(COUNTED_HERE.intersection(COMMITTED))))
def test_the_committed_ledger_is_that_of_this_code(contender):
    """If a row differs, `make ledger` counts anew, and its files replace those of benchmarks/results."""
    now, committed = entry(contender), COMMITTED[contender]
    assert now.whole().product_flops == committed.whole().product_flops
    for phase in PHASES:
        of_now, of_committed = now.phase(phase), committed.phase(phase)
        assert of_now.bytes == pytest.approx(of_committed.bytes, rel=2e-3), phase
        assert of_now.kernels == pytest.approx(of_committed.kernels, rel=2e-2), phase
    assert now.memory == pytest.approx(committed.memory, rel=2e-3)


# ---- models under the Trainer, called as users call them


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
