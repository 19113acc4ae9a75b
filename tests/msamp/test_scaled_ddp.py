"""Coded weights under DDP on two gloo processes: start, average, inf, replicas, unused layers."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import ddp as scaled_ddp
from lightning_lowprec.msamp import scale_linears, values_of
from lightning_lowprec.msamp.ddp import average_scaled_gradients, prepare_for_ddp
from lightning_lowprec.numerics import fp8_average as fp8_gradients
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import Toy, adamw, train
from tests.msamp.scaled_cases import accumulate

LEVELS = ["O1", "O2", "O3"]
pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.sometimes = nn.Linear(32, 32, bias=False)

    def forward(self, x, sometimes=False):
        y = self.second(torch.relu(self.norm(self.first(x))))
        return y + self.sometimes(x) if sometimes else y


def model_of(level, rank):
    torch.manual_seed(rank)  # differs until rank 0's weights are sent
    model = Net()
    del model.unused.bias  # DDP must not wait for it
    model.unused.register_parameter("bias", None)
    scale_linears(model, ["first", "second", "unused", "sometimes"], level)
    return model


def wrapped(level, rank):
    model = model_of(level, rank)
    prepare_for_ddp(model)
    return model, DistributedDataParallel(model)


def batch(rank):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))


def grads(model):
    coded = [(name, p) for name, p in model.named_parameters() if hasattr(p, "msamp_state")]
    return {name: None if p.grad is None else p.grad.decode() for name, p in coded}


def one_average(level, rank):
    model, ddp = wrapped(level, rank)
    start = {name: values_of(p) for name, p in model.named_parameters() if hasattr(p, "msamp_state")}
    ddp(batch(rank)).square().mean().backward()
    if rank == 1:
        model.sometimes(batch(rank)).square().mean().backward()
    before = grads(model)
    average_scaled_gradients(ddp.parameters())
    return {"start": start, "before": before, "after": grads(model)}


def trained(level, rank):
    """By Fabric; the features of the layers are no multiples of 16."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=MSAMP(level, stochastic_rounding=True))
    fabric.launch()
    module = Toy(rank, width=20)
    model, optimizer = fabric.setup(module, adamw(module))
    train(fabric, model, optimizer, range(5), 2)
    return module.state_dict()


def overflow(rank):
    model, ddp = wrapped("O2", rank)
    ddp(batch(rank)).square().mean().backward()
    if rank == 1:
        accumulate(model.first.weight, torch.full((32, 32), float("inf")))
    average_scaled_gradients(model.parameters())
    return grads(model)


def worker(rank):
    result = {level: one_average(level, rank) for level in LEVELS}
    result["trained"] = {level: trained(level, rank) for level in LEVELS}
    scaled_ddp._BUCKET = 1500  # less than two weights
    result["small-buckets"] = one_average("O2", rank)
    scaled_ddp._BUCKET = 1 << 23
    result["overflow"] = overflow(rank)
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("scaled-ddp"))


@pytest.mark.parametrize("level", LEVELS)
def test_all_ranks_start_with_the_weights_of_rank_0(results, level):
    own = {name: values_of(p) for name, p in model_of(level, 0).named_parameters() if hasattr(p, "msamp_state")}
    for result in results:
        assert result[level]["start"].keys() == own.keys()
        assert all(torch.equal(own[name], value) for name, value in result[level]["start"].items())


@pytest.mark.parametrize("case", [*LEVELS, "small-buckets"])
def test_the_average_is_that_of_the_hook_on_every_rank(results, case):
    mine, other = (result[case] for result in results)
    for name in ("first.weight", "second.weight", "sometimes.weight"):
        parts = [r["before"][name] for r in (mine, other)]
        flat = torch.stack([torch.zeros(32 * 32) if part is None else part.flatten() for part in parts])
        sizes = [32 * 32]
        amaxes = torch.stack([fp8_gradients.run_amaxes(g, sizes) for g in flat]).amax(0)
        codes = fp8_gradients.mean(torch.stack([fp8_gradients.encode_runs(g, sizes, amaxes) for g in flat]))
        expected = fp8_gradients.decode_runs(codes, sizes, amaxes, torch.float32).view(32, 32)
        assert torch.equal(mine["after"][name], expected)
        assert torch.equal(other["after"][name], expected)
    assert mine["before"]["sometimes.weight"] is None


def test_a_layer_that_no_rank_used_stays_without_a_gradient(results):
    assert all(result[level]["after"]["unused.weight"] is None for result in results for level in LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_replicas_stay_bit_identical(results, level):
    a, b = (result["trained"][level] for result in results)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["blocks.0.fc_in.weight"], Toy(0, width=20).blocks[0].fc_in.weight)


def test_inf_on_one_rank_is_nan_on_all(results):
    for result in results:
        assert bool(result["overflow"]["first.weight"].isnan().all())
        assert bool(result["overflow"]["second.weight"].isfinite().all())
