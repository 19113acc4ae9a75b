"""The watch over the first training forwards on CUDA: a forward that is captured as a CUDA graph."""

import lightning as L
import torch
from torch import nn

import lightning_lowprec  # noqa: F401  # registers the names


def test_the_first_forward_can_be_captured():
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cuda", devices=1)
    model = fabric.setup(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda())
    x, graph = torch.randn(32, 64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum()
    graph.replay()
    assert fabric.strategy.precision.modules.watched_forwards == 1
