"""The lean names on CUDA: bytes per parameter at rest and in the step, a launch per weight, and no wait."""

import gc
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.ledger.recorder import recording
from lightning_lowprec import HalfMixed
from lightning_lowprec.masters import in_backward
from lightning_lowprec.masters.config import LEAN, LEAN_SR, MasterConfig

LAYERS, WIDTH = 4, 2048
WEIGHT = WIDTH * WIDTH
EXPONENTS = 2 / 256  # bytes per parameter, of two moments
SMALL = 1_000_000


def held_now():
    """The bytes that are allocated, without cuBLAS's workspaces and what other tests have left behind."""
    for _ in range(3):  # some reference cycles take more than one round
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("config", "held"),
    [(LEAN, 6), (replace(LEAN, form="remainder8"), 5), (LEAN_SR, 4), (MasterConfig.of("8bit"), 6)],
    ids=["bf16-lean", "remainder8", "bf16-lean-sr", "bf16-8bit"],
)
def test_bytes_launches_and_waits(config, held, monkeypatch):
    """Above what is held, the backward has one gradient and what autograd makes of the next one; a step has all."""
    monkeypatch.setattr(in_backward, "WAITING", WEIGHT)
    before = held_now()
    torch.cuda.empty_cache()
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", master_weights=config))
    with torch.device("cuda"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    x = torch.zeros(16, WIDTH, dtype=torch.bfloat16, device="cuda")

    def step():
        fabric.backward(model(x).float().sum())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    count = LAYERS * WEIGHT
    rest = held_now() - before
    # an earlier test's tensors, less than SMALL, may be freed in between
    assert abs(rest - (held + EXPONENTS) * count) <= SMALL
    step()  # cuBLAS's workspaces are there again
    workspaces = torch.cuda.memory_allocated() - before - rest
    torch.cuda.reset_peak_memory_stats()
    with recording() as log:
        step()
    grown = torch.cuda.max_memory_allocated() - before - rest - workspaces
    gradients = 1 if config.update == "backward" else LAYERS
    assert gradients * 2 * WEIGHT <= grown <= (gradients + 1) * 2 * WEIGHT + SMALL
    launches = [record for record in log.of("kernel") if "step_parameters" in record.name]
    assert len(launches) == (LAYERS if config.update == "backward" else 1)
    assert not log.waits()


BLOCK = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
"""Inputs and outputs of the linear layers of one block of Llama-3-8B."""


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        wide = {"dtype": torch.bfloat16, "device": "cuda"}
        layers = [nn.Linear(*shape, bias=False, **wide) for _ in range(blocks) for shape in BLOCK]
        self.layers = nn.ModuleList([*layers, *(nn.LayerNorm(4096, bias=False, **wide) for _ in range(2 * blocks))])

    def forward(self, x):
        return sum(layer(x[:, : layer.weight.shape[-1]]).float().sum() for layer in self.layers)


def backward_calls(config, blocks, fused):
    """Kernels and copies of one backward."""
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", master_weights=config))
    net = Stack(blocks)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), fused=fused))
    x = torch.zeros(16, 14336, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        loss = model(x)
        with recording() as log:
            fabric.backward(loss)
        assert config.update == "step" or all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return log.count("kernel", "memcpy", "memset")


@pytest.mark.parametrize("fused", [True, None])
def test_an_update_in_the_backward_takes_few_launches_per_block(fused):
    """Beside the backward that updates in the step; the difference of four and two blocks of Llama-3-8B."""
    calls = [backward_calls(config, blocks, fused) for config in (LEAN, MasterConfig.of("8bit")) for blocks in (2, 4)]
    per_block = ((calls[1] - calls[3]) - (calls[0] - calls[2])) / 2
    print(f"fused={fused}: {per_block} launches and copies per block")
    assert per_block <= 60
