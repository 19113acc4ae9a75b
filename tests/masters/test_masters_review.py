"""State that is loaded from itself, and optimizers that cannot have masters."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_lowprec.masters.optimizer import add_masters, main_params


def trained(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(64, generator=generator).bfloat16())
    optimizer = add_masters(torch.optim.AdamW([weight], lr=1e-4))
    for _ in range(5):
        weight.grad = torch.randn(64, generator=generator).bfloat16()
        optimizer.step()
    return weight, optimizer


def master_of(optimizer):
    return next(iter(main_params(optimizer))).clone()


def test_loading_its_own_state_dict_changes_nothing():
    _, optimizer = trained()
    before = master_of(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(master_of(optimizer), before)


@pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint in one process says so, several times
def test_a_distributed_checkpoint_loads_in_place(tmp_path):
    weight, optimizer = trained()
    dcp.save({"w": weight, "o": optimizer.state_dict()}, checkpoint_id=tmp_path)
    other, fresh = trained(seed=1)
    state = {"w": other, "o": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state["o"])
    assert torch.equal(other, weight)
    assert torch.equal(master_of(fresh), master_of(optimizer))


def test_an_optimizer_that_steps_another_is_refused(tmp_path):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="ZeroRedundancyOptimizer steps another optimizer inside"):
            add_masters(ZeroRedundancyOptimizer([weight], optimizer_class=torch.optim.SGD, lr=0.1))
    finally:
        dist.destroy_process_group()
