"""Coded weights under DDP on two gloo processes: start, average, bytes, inf, replicas, unused layers."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.msamp import ddp as scaled_ddp
from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.ddp import average_scaled_gradients, prepare_for_ddp
from lightning_lowprec.msamp.linear import scale_linears
from lightning_lowprec.msamp.weight import values_of
from lightning_lowprec.numerics import fp8_average as fp8_gradients
from tests.fsdp2.ranks import run
from tests.msamp.scaled_cases import accumulate

LEVELS = ["O1", "O2", "O3"]
pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.sometimes = nn.Linear(width, width, bias=False)

    def forward(self, x, sometimes=False):
        y = self.second(torch.relu(self.norm(self.first(x))))
        return y + self.sometimes(x) if sometimes else y


def model_of(level, rank, width=32):
    torch.manual_seed(rank)  # differs until rank 0's weights are sent
    model = Net(width)
    del model.unused.bias  # DDP must not wait for it
    model.unused.register_parameter("bias", None)
    scale_linears(model, ["first", "second", "unused", "sometimes"], level)
    return model


def wrapped(level, rank, width=32):
    model = model_of(level, rank, width)
    prepare_for_ddp(model)
    return model, DistributedDataParallel(model)


def batch(rank, step=0, width=32):
    return torch.randn(16, width, generator=torch.Generator().manual_seed(10 * step + rank))


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


def trained(level, rank, steps=5):
    model, ddp = wrapped(level, rank)
    optimizer = ScaledAdamW(model.parameters(), lr=1e-2, level=level, stochastic_rounding=True)
    for step in range(steps):
        for micro in range(2):
            with ddp.no_sync() if micro == 0 else torch.enable_grad():
                ddp(batch(rank, 2 * step + micro)).square().mean().backward()
        average_scaled_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Sent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        factors = {"c10d::allreduce_": 1, "c10d::alltoall_base_": 0.5, "c10d::_allgather_base_": 0.5}  # 2 ranks
        if func.name() in factors:
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.bytes[func.name()] += factors[func.name()] * tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def bytes_per_weight(rank):
    model, ddp = wrapped("O2", rank, width=128)
    ddp(batch(rank, width=128)).square().mean().backward()
    with Sent() as sent:
        average_scaled_gradients(model.parameters())
    return sum(sent.bytes.values()) / (2 * 128 * 128)


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
    result["bytes"], result["overflow"] = bytes_per_weight(rank), overflow(rank)
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
    fresh = model_of(level, 0).state_dict()
    assert not torch.equal(a["first.weight"], fresh["first.weight"])


def test_one_byte_per_weight_on_the_wire(results):
    assert all(1.0 <= result["bytes"] <= 1.05 for result in results)


def test_inf_on_one_rank_is_nan_on_all(results):
    for result in results:
        assert bool(result["overflow"]["first.weight"].isnan().all())
        assert bool(result["overflow"]["second.weight"].isfinite().all())
