"""The watch for float32 products on CUDA: the warning, and a first forward that is captured as a CUDA graph."""

import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_lowprec  # noqa: F401  # registers the names


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(4, 64, 64))
        self.register_buffer("ends", torch.arange(8, 33, 8, dtype=torch.int32))

    def forward(self, x):
        return F.grouped_mm(self.linear(x).to(self.weight.dtype), self.weight, offs=self.ends)


def setup(name, model):
    fabric = L.Fabric(precision=name, accelerator="cuda", devices=1)
    return fabric, fabric.setup(model.cuda())


@pytest.mark.parametrize("name", ["half-auto", "fp8-tensorwise", "fp8-hybrid-te"])
def test_warns_once(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric, model = setup(name, Experts())
        for _ in range(3):
            fabric.backward(model(torch.randn(32, 64, device="cuda")).square().mean())
    (message,) = [str(warning.message) for warning in caught if "multiplies in float32" in str(warning.message)]
    assert "'Experts' multiplies in float32, by `aten._grouped_mm` ([32, 64] x [4, 64, 64])" in message


def test_the_first_forward_can_be_captured():
    fabric, model = setup("half-auto", nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    x, graph = torch.randn(32, 64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum()
    graph.replay()
    assert fabric.strategy.precision.modules.watched_forwards == 1
