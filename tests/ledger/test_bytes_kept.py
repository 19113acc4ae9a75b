"""Bytes per parameter between steps, by torch's allocator: a block of an 8B Llama under adapters, and FlashOptim."""

import flashoptim
import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO

HIDDEN, KEYS, INNER, RANK = 4096, 1024, 14336, 16
SHAPES = [(HIDDEN, HIDDEN), (HIDDEN, KEYS), (HIDDEN, KEYS), (HIDDEN, HIDDEN)]
SHAPES += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
BASE = sum(k * n for k, n in SHAPES)
ADAPTERS = sum(RANK * (k + n) for k, n in SHAPES)
STATE = 4 * 4  # float32: weight, gradient and AdamW's moments


class Adapted(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.base = nn.Linear(k, n, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(k, RANK, bias=False), nn.Linear(RANK, n, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


def held(frozen, recipe):
    before = torch.cuda.memory_allocated()
    fabric = L.Fabric(
        accelerator="cuda", devices=1, plugins=FP8TorchAO(recipe, frozen=frozen, compile=False, keep=["*lora_*"])
    )
    with torch.device("cuda"):
        model = nn.ModuleList(Adapted(*shape) for shape in SHAPES)
    trained = [p for p in model.parameters() if p.requires_grad]
    _, optimizer = fabric.setup(model, torch.optim.AdamW(trained, lr=1e-3, foreach=False))
    inputs = {k: torch.zeros(16, k, device="cuda", dtype=torch.bfloat16, requires_grad=True) for k in (HIDDEN, INNER)}
    for part in model:
        with fabric.autocast():
            fabric.backward(part(inputs[part.base.in_features]).float().sum())
    optimizer.step()
    inputs.clear()
    return torch.cuda.memory_allocated() - before


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
def test_the_base_takes_a_byte_per_parameter():
    held("codes", "tensorwise")  # torch's workspaces stay
    for recipe in ("tensorwise", "block"):
        scales = 4 * sum(-(-k // 128) * -(-n // 128) for k, n in SHAPES) if recipe == "block" else 0
        assert held("codes", recipe) == pytest.approx(BASE + scales + STATE * ADAPTERS, rel=0.005)
    assert held("convert", "tensorwise") == pytest.approx(2 * BASE + STATE * ADAPTERS, rel=0.005)


# ---- FlashOptim's AdamW under our names


SIDE = 4096


@pytest.fixture(autouse=True)
def libraries_have_their_workspaces():
    x = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()


def held_by(make):
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
    found = held_by(lambda p: flashoptim.FlashAdamW(p, lr=1e-3, master_weight_bits=bits))
    assert found == pytest.approx(expected + 2 * 2 / 32, abs=0.05)


def test_gradients_are_released_under_fp8_with_kept_weights():
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(weights="keep"))
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(torch.bfloat16)
    optimizer = flashoptim.FlashAdamW(model.parameters(), lr=1e-3)
    module, wrapped = fabric.setup(model, optimizer)
    flashoptim.enable_gradient_release(model, optimizer)
    for _ in range(2):
        fabric.backward(module(torch.zeros(8, 256, device="cuda")).float().square().mean())
        assert all(p.grad is None for p in model.parameters())
        wrapped.step()
