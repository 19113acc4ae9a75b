"""The wrapper is free: the same aten operations and collectives as the same torchao code by hand."""

import os

import pytest
import torch.distributed as dist

from benchmarks.hook_overhead import DEPTH, measure

MOST_CALLS = {"trainer": 20, "fabric": 24}
"""Python calls into our files per step, beside those of the layers."""
MOST_CALLS_PER_LAYER = 3
"""Python calls into our files per layer: forward, what it chooses, backward."""


@pytest.fixture(autouse=True)
def leave_no_process_group():
    """DDP runs in this process; later tests must not find themselves distributed."""
    environment = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.filterwarnings("ignore:.*(many workers|`training_step` returned|isinstance.treespec).*")
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_step_makes_the_calls_of_the_code_by_hand(strategy):
    result = measure(strategy)
    for where in ("trainer", "fabric"):
        ours, by_hand = result[where]["ours"], result[where]["by_hand"]
        assert ours.aten == by_hand.aten
        assert ours.aten["aten.mm.default"] >= 3 * DEPTH, "the FP8 GEMMs were not counted"
        assert ours.collectives == by_hand.collectives
        assert sum(ours.collectives.values()) == (0 if strategy == "auto" else 2), "one all-reduce, seen twice"
        calls = {name: count for name, count in ours.calls.items() if name != "count_step"}  # of tests before this one
        assert calls["FP8Layer.forward"] == DEPTH, "the profiler does not see our files"
        assert sum(calls.values()) <= MOST_CALLS[where] + MOST_CALLS_PER_LAYER * DEPTH, calls
