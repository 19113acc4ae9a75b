"""Coded weights under DDP on two gloo processes: start, average, unused layers."""

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp import ddp as scaled_ddp
from lightning_lowprec.msamp import scale_linears, values_of
from lightning_lowprec.msamp.ddp import average_scaled_gradients, broadcast_codes
from lightning_lowprec.numerics import fp8_average as fp8_gradients
from tests.fsdp2.ranks import run

LEVELS = ["O1", "O2", "O3"]
NAMES = ["always", "also", "sometimes", "unused"]
pytestmark = pytest.mark.distributed


def model_of(level, rank):
    torch.manual_seed(rank)  # differs until rank 0's weights are sent
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in NAMES})
    scale_linears(model, NAMES, level)
    return model


def values(model):
    return {name: values_of(layer.weight) for name, layer in model.items()}


def grads(model):
    found = {name: layer.weight.grad for name, layer in model.items()}
    return {name: None if grad is None else grad.decode() for name, grad in found.items()}


def one_average(level, rank):
    model = model_of(level, rank)
    broadcast_codes(model)
    start = values(model)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    model["also"](model["always"](x).relu()).square().mean().backward()
    if rank == 1:
        model["sometimes"](x).square().mean().backward()
    before = grads(model)
    average_scaled_gradients(model.parameters())
    return {"start": start, "before": before, "after": grads(model)}


def worker(rank):
    result = {level: one_average(level, rank) for level in LEVELS}
    scaled_ddp._BUCKET = 1500  # less than two weights
    result["small-buckets"] = one_average("O2", rank)
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("scaled-ddp"))


@pytest.mark.parametrize("case", [*LEVELS, "small-buckets"])
def test_the_average_is_that_of_the_hook_on_every_rank(results, case):
    mine, other = (result[case] for result in results)
    own = values(model_of(case if case in LEVELS else "O2", 0))
    assert all(torch.equal(own[name], value) for name, value in other["start"].items()), "the weights of rank 0"
    for name in ("always", "also", "sometimes"):
        parts = [r["before"][name] for r in (mine, other)]
        flat = torch.stack([torch.zeros(32 * 32) if part is None else part.flatten() for part in parts])
        sizes = [32 * 32]
        amaxes = torch.stack([fp8_gradients.run_amaxes(g, sizes) for g in flat]).amax(0)
        codes = fp8_gradients.mean(torch.stack([fp8_gradients.encode_runs(g, sizes, amaxes) for g in flat]))
        expected = fp8_gradients.decode_runs(codes, sizes, amaxes, torch.float32).view(32, 32)
        assert torch.equal(mine["after"][name], expected)
        assert torch.equal(other["after"][name], expected)
    assert mine["before"]["sometimes"] is None
    assert mine["after"]["unused"] is other["after"]["unused"] is None, "no rank used it"
