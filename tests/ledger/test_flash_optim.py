"""FlashOptim's AdamW under our names: bytes per parameter between steps by the allocator, and released gradients."""

import flashoptim
import lightning as L
import pytest
import torch
from torch import nn

import lightning_lowprec as lp

SIDE = 4096


@pytest.fixture(autouse=True)
def libraries_have_their_workspaces():
    x = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()


def held(make):
    before = torch.cuda.memory_allocated()
    fabric = L.Fabric(accelerator="cuda", devices=1, precision="bf16-8bit")
    with torch.device("cuda"):
        model = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)
    module, optimizer = fabric.setup(model, make(model.parameters()))
    for _ in range(2):
        fabric.backward(module(torch.zeros(16, SIDE, device="cuda")).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return (torch.cuda.memory_allocated() - before) / SIDE**2


@pytest.mark.parametrize(("bits", "expected"), [(24, 2 + 1 + 2), (32, 2 + 2 + 2)])
def test_it_brings_its_own_masters(bits, expected):
    """bf16 weights, 8 or 16 bits of digits, two moments of int8 with a scale of 2 bytes per 32 numbers."""
    found = held(lambda p: flashoptim.FlashAdamW(p, lr=1e-3, master_weight_bits=bits))
    assert found == pytest.approx(expected + 2 * 2 / 32, abs=0.05)


def test_gradients_are_released_under_fp8_with_kept_weights():
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=lp.FP8TorchAO(weights="keep"))
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(torch.bfloat16)
    optimizer = flashoptim.FlashAdamW(model.parameters(), lr=1e-3)
    module, wrapped = fabric.setup(model, optimizer)
    flashoptim.enable_gradient_release(model, optimizer)
    for _ in range(2):
        fabric.backward(module(torch.zeros(8, 256, device="cuda")).float().square().mean())
        assert all(p.grad is None for p in model.parameters())
        wrapped.step()
