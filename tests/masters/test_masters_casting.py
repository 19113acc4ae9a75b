"""cast_parameters: same Parameter objects, ties, frozen ones; what is kept, skipped and left alone."""

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.weights import HalfWeights, cast_parameters

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
    assert id(net.wide) not in originals
    assert net.wide.dtype == torch.float64
    assert net.codes.dtype == torch.float8_e4m3fn
    assert cast_parameters(net, torch.bfloat16, keep=True) == {}


def test_metrics_and_float64_and_complex_layers_stay():
    """torch itself computes the distance; what only the metric holds must give the same bits."""
    model = nn.ModuleDict(
        {
            "net": nn.Linear(4, 4),
            "wide": nn.Linear(4, 4).double(),
        }
    )
    model["fourier"] = nn.Linear(4, 4, dtype=torch.complex64)
    model["metric"] = Distance(nn.Linear(4, 4), nn.Linear(4, 4).half())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.startswith("net")}
    HalfWeights(MasterConfig(), buffer_dtype=torch.bfloat16).cast(model, torch.bfloat16)
    assert model["net"].weight.dtype == torch.bfloat16
    for name, tensor in before.items():
        assert model.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(model.state_dict()[name], tensor), name


class Distance(Metric):
    update = compute = nn.Module.forward

    def __init__(self, encoder, half):
        super().__init__()
        self.encoder, self.half_encoder = encoder, half
        self.register_buffer("mean", torch.randn(3))
