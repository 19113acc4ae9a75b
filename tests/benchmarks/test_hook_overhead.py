"""The wrapper is free: no more operations, collectives and Python calls than the same torchao code by hand."""

import os

import pytest
import torch.distributed as dist

from benchmarks.hook_overhead import DEPTH, measure


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
        assert {name for name, count in ours.aten.items() if count > by_hand.aten.get(name, 0)} == set()
        assert ours.aten["aten::mm"] == 3 * DEPTH - 1, "the first layer has no gradient of its input"
        assert ours.collectives == by_hand.collectives
        assert sum(ours.collectives.values()) == (0 if strategy == "auto" else 2), "one all-reduce, seen twice"
        assert 10 * DEPTH < ours.calls <= by_hand.calls
