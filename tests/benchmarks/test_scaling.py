"""Set-up and a step take as many calls per block for many blocks as for few."""

import sys
from functools import partial

import lightning as L
import pytest
import torch

from tests import toys

pytestmark = pytest.mark.slow

NAMES = (
    "bf16-mixed", "fp8-hybrid", "fp8-rowwise", "int8-mixed", "half-auto", "fp16-master", "bf16-remainder", "bf16-sr",
    "fp8-hybrid-remainder", "msamp-o1", "msamp-o2", "msamp-o3",
)  # fmt: skip
WIDTH, ROWS, STEPS = 32, 32, 2
FEW, TIMES = 8, 4
SET_UP = 8000
"""The most calls that set-up may take per block; looking private names up again for every weight took 13 ms."""


def calls(run):
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, count


def costs(name, blocks):
    model = toys.Stack(lambda: toys.Block(WIDTH), blocks)

    def set_up():
        fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
        module = fabric.setup_module(model)
        return fabric, module, fabric.setup_optimizers(torch.optim.AdamW(module.parameters()))

    (fabric, module, optimizer), first = calls(set_up)
    found = {"set-up": first}

    def step():
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):  # the first one makes the state
        loss, found["forward"] = calls(lambda: module(torch.ones(ROWS, WIDTH)).float().pow(2).mean())
        _, found["backward"] = calls(partial(fabric.backward, loss))
        _, found["step"] = calls(step)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_set_up_and_step_are_linear_in_the_number_of_blocks(name):
    """What does not depend on the blocks makes the ratio smaller."""
    costs(name, 2)  # imports
    few, many = (costs(name, blocks) for blocks in (FEW, TIMES * FEW))
    assert {part: count for part, count in many.items() if count > TIMES * few[part]} == {}
    assert many["set-up"] <= SET_UP * TIMES * FEW
