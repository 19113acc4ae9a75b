"""The FP8 kernels against emulation, and against float32: FP8 runs, and it is the FP8 that the documents describe."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.losses import linear_cross_entropy
from tests.gpu.device import DEVICE, FP8_NAMES, NO_VALUES, on_gpu_only, runs_here
from tests.quality import sqnr

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
AGREEMENT_DB = 35.0
FP8_DB = (20.0, 40.0)
"""One Linear in FP8 against float32: worse is broken, better is not FP8 (bf16 is beyond 45 dB)."""
NVFP4_DB = 12.0
"""4 bits with one of mantissa are some 20 dB from either operand; measured by nobody here."""
TOKENS, K, N = 512, 1024, 768


def gradients(model, plugin, x, grad):
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, **({"plugins": plugin} if plugin else {}))
    module = fabric.setup_module(copy.deepcopy(model))
    x = x.clone().requires_grad_()
    y = module(x)
    fabric.backward((y * grad).sum())
    weight = next(p for p in module.parameters() if p.ndim == 2)
    return {"output": y.detach(), "grad_input": x.grad, "grad_weight": weight.grad}


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N)).to(DEVICE)
    return model, torch.randn(TOKENS, K, device=DEVICE), torch.randn(TOKENS, N, device=DEVICE)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.rehearsed)])
def test_kernels_agree_with_emulation(problem, recipe, compiled, record_property):
    if compiled and DEVICE.type == "cpu":
        pytest.skip("slow on CPU")
    model, x, grad = problem
    real_model = copy.deepcopy(model)
    plugin = FP8TorchAO(recipe=recipe, compile=False)
    if compiled:
        real_model[0].compile()
    real = gradients(real_model, plugin, x, grad)
    emulated = gradients(model, FP8TorchAO(recipe=recipe, compile=False, emulate=True), x, grad)
    found = {what: sqnr(emulated[what], real[what]) for what in real}
    record_property("sqnr_db", found)
    assert min(found.values()) > AGREEMENT_DB or NO_VALUES, found


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_fp8_that_runs(problem, recipe, record_property):
    model, x, grad = problem
    exact = gradients(model, None, x, grad)
    found = {
        what: sqnr(exact[what], value)
        for what, value in gradients(model, FP8TorchAO(recipe=recipe, compile=False), x, grad).items()
    }
    record_property("sqnr_db", found)
    low = {what: value for what, value in found.items() if what != "grad_weight" or recipe != "rowwise_with_gw_hp"}
    assert all(FP8_DB[0] < value < FP8_DB[1] for value in low.values()) or NO_VALUES, found


@pytest.mark.parametrize("name", FP8_NAMES)
def test_every_fp8_name_is_fp8(problem, name, record_property):
    reason = runs_here(name)
    if reason is not None:
        pytest.skip(reason)
    model, x, _ = problem
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, precision=name)
    module = fabric.setup_module(copy.deepcopy(model))
    with torch.no_grad():
        found = sqnr(model(x), module(x))
    record_property("sqnr_db", found)
    low = NVFP4_DB if name == "nvfp4-te" else FP8_DB[0]
    assert low < found < FP8_DB[1] or NO_VALUES


@on_gpu_only
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_of_cuda_reaches_everything(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 16)).to(DEVICE)
    seen = {}
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(base=dtype, keep=["2"], compile=False))
    module = fabric.setup_module(model)
    for fqn, layer in model.named_children():
        layer.register_forward_hook(lambda _, args, out, fqn=fqn: seen.update({fqn: out.dtype}))
    module(torch.randn(32, 64, device=DEVICE))
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert seen == {"0": half, "1": torch.float32, "2": half}


# ---- the loss from hidden states: against all logits, and FP8 kernels against their emulation


REHEARSED = pytest.mark.rehearsed  # tests/ledger/test_head.py runs these kernels in bf16
ROWS, FEATURES, CLASSES = 3000, 256, 5000  # several chunks of rows, the last one ragged


def step(loss_of, dtype, **options):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(ROWS, FEATURES, generator=generator).to(DEVICE, dtype).requires_grad_()
    w = (torch.randn(CLASSES, FEATURES, generator=generator) * 0.1).to(DEVICE, dtype).requires_grad_()
    t = torch.randint(0, CLASSES, (ROWS,), generator=generator).to(DEVICE)
    t[:9] = -100
    loss = loss_of(h, w, t, **options)
    loss.backward()
    return loss.detach(), h.grad, w.grad


def all_logits(h, w, t, label_smoothing=0.0):
    return F.cross_entropy(F.linear(h, w).float(), t, label_smoothing=label_smoothing)


@pytest.mark.parametrize(
    ("dtype", "label_smoothing"),
    [
        (torch.float16, 0.1),
        pytest.param(torch.float16, 0.0, marks=REHEARSED),
        pytest.param(torch.bfloat16, 0.1, marks=REHEARSED),
        pytest.param(torch.bfloat16, 0.0, marks=REHEARSED),
    ],
)
def test_kernels_compute_the_loss_of_all_logits(dtype, label_smoothing):
    expected, *gradients = step(all_logits, dtype, label_smoothing=label_smoothing)
    loss, *found = step(linear_cross_entropy, dtype, rows=1024, label_smoothing=label_smoothing)
    assert abs(loss - expected) <= 1e-5 * expected or NO_VALUES
    for made, wanted in zip(found, gradients, strict=True):
        assert sqnr(wanted, made) >= 40 or NO_VALUES


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=REHEARSED)])
def test_fp8_kernels_agree_with_their_emulation(dtype):
    loss, *found = step(linear_cross_entropy, dtype, fp8=True, rows=1024)
    expected, *gradients = step(linear_cross_entropy, dtype, fp8=True, rows=1024, emulate=True)
    assert abs(loss - expected) <= 1e-3 * expected or NO_VALUES
    for made, wanted in zip(found, gradients, strict=True):
        assert sqnr(wanted, made) >= 30 or NO_VALUES
