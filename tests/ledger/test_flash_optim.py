"""FlashOptim's AdamW under our names: bytes per parameter between steps, beside those of ours, by torch's allocator."""

import lightning as L
import pytest
import torch
from torch import nn
from triton.runtime import jit

import lightning_lowprec as lp

flashoptim = pytest.importorskip("flashoptim")
SIDE = 4096


@pytest.fixture(autouse=True)
def libraries_have_their_workspaces():
    x = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()


def held(precision, make):
    """Bytes per parameter of weights, masters and moments after two steps."""
    before = torch.cuda.memory_allocated()
    fabric = L.Fabric(accelerator="cuda", devices=1, **precision)
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
    found = held({"precision": "bf16-8bit"}, lambda p: flashoptim.FlashAdamW(p, lr=1e-3, master_weight_bits=bits))
    assert found == pytest.approx(expected + 2 * 2 / 32, abs=0.05)


def test_ours_takes_six_bytes_beside_the_gradient():
    found = held({"precision": "bf16-8bit"}, lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert found == pytest.approx(2 + 2 + 2, abs=0.05)


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


def moved(make):
    """Bytes per parameter that a step of one weight reads and writes: every argument of its kernels, the gradient once.

    Without error bits FlashOptim hands the weight to its kernel a second time, and reads it once.
    """
    taken = []
    fabric = L.Fabric(accelerator="cuda", devices=1, precision="bf16-8bit")
    with torch.device("cuda"):
        model = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)
    module, optimizer = fabric.setup(model, make(model.parameters()))
    run = jit.JITFunction.run

    def counting(kernel, *args, **options):
        if kernel.__module__.startswith("flashoptim"):
            tensors = {t.data_ptr(): t for t in args if isinstance(t, torch.Tensor)}.values()
            taken.append(2 * sum(t.numel() * t.element_size() for t in tensors) - 2 * SIDE**2)
        return run(kernel, *args, **options)

    jit.JITFunction.run = counting
    try:
        for _ in range(2):
            fabric.backward(module(torch.zeros(16, SIDE, device="cuda")).float().square().mean())
            taken.clear()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        jit.JITFunction.run = run
    return sum(taken) / SIDE**2


@pytest.mark.parametrize("bits", [None, 24, 32])
def test_bytes_of_its_step(bits):
    """Weight, error bits and two moments with scales are read and written, the gradient is read."""
    expected = 2 * (2 + ((bits or 16) - 16) / 8 + 2 * (1 + 2 / 32)) + 2
    assert moved(lambda p: flashoptim.FlashAdamW(p, lr=1e-3, master_weight_bits=bits)) == expected
