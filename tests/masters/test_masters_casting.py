"""cast_parameters: same Parameter objects, ties, frozen ones; what is kept, skipped and left alone."""

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.moments import MASTER_PARAM
from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.masters.weights import cast_parameters

HALVES = [torch.float16, torch.bfloat16]


def model():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[2].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("dtype", HALVES)
def test_in_place_with_ties_and_frozen_parameters(dtype):
    net = model()
    before = {name: (p, p.detach().clone()) for name, p in net.named_parameters()}
    originals = cast_parameters(net, dtype, keep=True)
    assert dict(net.named_parameters()).keys() == before.keys()
    for name, p in net.named_parameters():
        same, value = before[name]
        assert p is same
        assert p.dtype == dtype
        assert torch.equal(p, value.to(dtype))
        assert torch.equal(originals[id(p)], value)
    assert net[2].weight is net[0].weight
    assert not net[2].bias.requires_grad
    assert len(originals) == 5
    assert net[1].running_mean.dtype == torch.float32


def test_buffers_gradients_and_not_keeping():
    net = model()
    net[0].weight.grad = torch.ones(4, 4)
    mean = net[1].running_mean
    assert cast_parameters(net, torch.bfloat16, keep=False, buffer_dtype=torch.bfloat16) == {}
    assert net[0].weight.grad.dtype == torch.bfloat16
    assert net[1].running_mean is mean
    assert mean.dtype == torch.bfloat16
    assert net[1].num_batches_tracked.dtype == torch.int64
    net(torch.randn(3, 4).bfloat16()).sum().backward()


def test_skip_by_name_counts_every_name_of_a_tie():
    net = model()
    cast_parameters(net, torch.bfloat16, keep=False, skip=["1.weight", "1.bias", "2.weight"])
    assert {name for name, p in net.named_parameters() if p.dtype == torch.float32} == {
        "0.weight",
        "1.weight",
        "1.bias",
    }


def test_the_second_cast_keeps_nothing_and_other_dtypes_stay():
    net = model()
    net.register_parameter("codes", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False))
    net.register_parameter("wide", nn.Parameter(torch.ones(2).double()))
    originals = cast_parameters(net, torch.bfloat16, keep=True)
    assert originals[id(net.wide)].dtype == torch.float32
    assert net.codes.dtype == torch.float8_e4m3fn
    assert cast_parameters(net, torch.bfloat16, keep=True) == {}


def test_masters_from_the_kept_values_lose_nothing():
    net = model()
    exact = net[0].weight.detach().clone()
    originals = cast_parameters(net, torch.bfloat16, keep=True)
    optimizer = add_masters(optim.SGD(net.parameters(), lr=1.0), "remainder", values=originals)
    assert torch.equal(optimizer.state_dict()["state"][0][MASTER_PARAM], exact)
