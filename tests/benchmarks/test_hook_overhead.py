"""The wrapper is free: the same aten operations and collectives as the same torchao code by hand."""

import os

import pytest
import torch.distributed as dist

from benchmarks.hook_overhead import DEPTH, measure

# Python calls into our files per step, beside one forward and one backward per FP8 layer
TRAINER_ALLOWANCE = {
    "forward_context": 1, "autocast_dtype": 1, "_known_device": 1,
    "pre_backward": 1, "backward": 1, "_backward_plain": 1, "post_backward": 1, "scale_loss": 1,
    "in_trainer": 3, "trainer_of": 3,
    "optimizer_step": 1, "clip_gradients": 1,
}  # fmt: skip
FABRIC_ALLOWANCE = {
    "convert_input": 1, "convert_output": 1, "cast_floating": 2, "<lambda>": 2,
    "forward_context": 1, "autocast_dtype": 2, "_known_device": 2,
    "pre_backward": 1, "backward": 2, "_backward_plain": 1, "post_backward": 1,  # backward: Fabric asks for it once
    "in_trainer": 3, "trainer_of": 3,
    "optimizer_step": 1,
}  # fmt: skip


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
    for where, allowance in (("trainer", TRAINER_ALLOWANCE), ("fabric", FABRIC_ALLOWANCE)):
        ours, by_hand = result[where]["ours"], result[where]["by_hand"]
        assert ours.aten == by_hand.aten
        assert ours.aten["aten.mm.default"] >= 3 * DEPTH, "the FP8 GEMMs were not counted"
        assert ours.collectives == by_hand.collectives
        assert sum(ours.collectives.values()) == (0 if strategy == "auto" else 2), "one all-reduce, seen twice"
        calls = {name: count for name, count in ours.calls.items() if name != "count_step"}  # of tests before this one
        assert calls.pop("FP8Layer.forward") == calls.pop("_Matmul.backward") == DEPTH
        calls = {name.rpartition(".")[2]: n for name, n in calls.items()}
        assert calls == allowance
