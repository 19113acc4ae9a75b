"""Ragged batches on the real kernels: every number of tokens works, where torchao by itself fails."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from tests.gpu.device import DEVICE, NO_VALUES, on_gpu_only
from tests.gpu.subjects import FP8_NAMES, WIDTH, Stack, runs_here, sqnr

pytestmark = pytest.mark.rehearsed
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TOKENS = range(1, 41)
AGREEMENT_DB = 35.0
"""FP8 itself is near 28 dB from float32; the kernels must be far closer to the emulation of the same codes."""


def layer(recipe, emulate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96)).to(DEVICE)
    fabric = L.Fabric(
        accelerator=DEVICE.type, devices=1, plugins=FP8TorchAO(recipe=recipe, emulate=emulate, compile=False)
    )
    return fabric.setup_module(model)


def step(model, x):
    """Output, gradient of the input, gradient of the weight."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape).to(y.dtype))
    weight = next(p for p in model.parameters() if p.ndim == 2)
    return y.detach(), x.grad, weight.grad.clone()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_tokens_agrees_with_emulation(recipe, record_property):
    real, emulated = layer(recipe, None), layer(recipe, True)
    worst = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, 64, device=DEVICE)
        pairs = zip(("output", "grad_input", "grad_weight"), step(real, x), step(emulated, x), strict=True)
        for what, found, wanted in pairs:
            assert found.shape == wanted.shape
            worst[what] = min(worst.get(what, float("inf")), sqnr(wanted, found))
    record_property("worst_sqnr_db", worst)
    assert min(worst.values()) > AGREEMENT_DB or NO_VALUES, worst


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 7, 64), (2, 3, 1, 64)])
def test_any_leading_dimensions(recipe, shape):
    output, grad_input, grad_weight = step(layer(recipe, None), torch.randn(shape, device=DEVICE))
    assert output.shape == (*shape[:-1], 96)
    assert grad_input.shape == shape
    assert torch.isfinite(grad_weight).all() or NO_VALUES


@on_gpu_only
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_by_itself_fails_on_some_of_them(recipe, record_property):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96)).to(DEVICE)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    failed = []
    for tokens in TOKENS:
        try:
            with torch.autocast("cuda", torch.bfloat16):
                step(model, torch.randn(tokens, 64, device=DEVICE))
        except (RuntimeError, ValueError):
            failed.append(tokens)
    record_property("tokens_that_torchao_refuses", failed)
    assert failed, "torchao takes every number of tokens by now: our padding is not needed any more"
    assert not any(tokens % 16 == 0 for tokens in failed)


@pytest.mark.parametrize("name", FP8_NAMES)
def test_every_fp8_name_trains_on_ragged_batches(name):
    reason = runs_here(name)
    if reason is not None:
        pytest.skip(reason)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, precision=name)
    module = fabric.setup_module(Stack())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    for tokens in (1, 7, 17, 40, 1, 33):
        loss = module(torch.randn(tokens, WIDTH, device=DEVICE)).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss) or NO_VALUES
    assert all(torch.isfinite(p).all() for p in module.parameters()) or NO_VALUES
