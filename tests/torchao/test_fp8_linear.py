"""The FP8 linear against a hand-written FP8 reference, and for any batch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics import formats
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.torchao import linear as fp8
from lightning_lowprec.torchao.settings import Settings
from tests.torchao.fp8_reference import E4M3, E5M2, codes, dequantise, scale

RECIPES = {
    "tensorwise": ("tensorwise", "hybrid"),
    "e4m3": ("tensorwise", "e4m3"),
    "rowwise": ("rowwise", "e4m3"),
    "rowwise_with_gw_hp": ("rowwise_with_gw_hp", "e4m3"),
}
FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def linear(recipe="tensorwise", k=32, n=48, bias=True, fp8_eval=True, dtype=torch.float32, power_of_two=None):
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=bias, dtype=dtype)
    name, fp8_format = RECIPES[recipe]
    settings = Settings(fp8_format=fp8_format, emulate=True, round_scales_to_power_of_2=power_of_two)
    fp8.convert(layer, [""], lambda fqn: settings.of(LayerRecipe(name)), fp8_eval=fp8_eval)
    return layer


class Gemms:
    """Notes the operands of every product of codes: pairs of codes and scale, as the product a @ b reads them."""

    def __init__(self):
        self.operands = []

    def __enter__(self):
        self.multiply = multiply = Scaled.multiply

        def noting(how, a, b, dtype, product):
            self.operands.append((a[:2], tuple(part.t() for part in b[:2])))
            return multiply(how, a, b, dtype, product)

        Scaled.multiply = noting
        return self

    def __exit__(self, *_):
        Scaled.multiply = self.multiply


def run(layer, x, grad=None):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with Gemms() as gemms:
        out = layer(x)
        out.backward(torch.ones_like(out) if grad is None else grad)
    return out, x.grad, gemms.operands


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("power_of_two", [None, True, False])
def test_codes_scales_and_products_agree_with_the_reference(recipe, bias, power_of_two):
    layer = linear(recipe, bias=bias, power_of_two=power_of_two)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator) * torch.logspace(-6, 4, 64).unsqueeze(1)
    grad = torch.randn(64, 48, generator=generator) * torch.logspace(3, -8, 48)
    x[3], grad[5] = 0, 0
    out, grad_input, gemms = run(layer, x, grad)

    rows_gw_hp = recipe == "rowwise_with_gw_hp"
    assert len(gemms) == (2 if rows_gw_hp else 3)
    rounded = power_of_two if power_of_two is not None else recipe.startswith("rowwise")
    weight = layer.weight.detach()
    # output, grad_input, grad_weight: (what is multiplied, along which axis its amax runs)
    expected = [(x, 1, weight.t(), 0), (grad, 1, weight, None if rows_gw_hp else 0), (grad.t(), 1, x, 0)][: len(gemms)]
    results = [out.detach() - (layer.bias.detach() if bias else 0), grad_input, layer.weight.grad]
    for (a, b), (a_hp, a_axis, b_hp, b_axis), result in zip(gemms, expected, results, strict=False):
        operands = []
        for tensor, hp, axis in ((a, a_hp, a_axis), (b, b_hp, b_axis)):
            found, factor = tensor
            fmt, hp = FORMATS[found.dtype], hp.numpy()
            amax = np.abs(hp).max(axis=axis if recipe.startswith("rowwise") else None, keepdims=True)
            amax = amax if recipe.startswith("rowwise") and axis is not None else np.abs(hp).max()
            want_scale = scale(np.asarray(amax), fmt, rounded)
            want_codes = codes(hp, want_scale, fmt)
            np.testing.assert_array_equal(factor.numpy().reshape(want_scale.shape), want_scale)
            np.testing.assert_array_equal(found.contiguous().view(torch.uint8).numpy(), want_codes)
            operands.append(dequantise(want_codes, want_scale, fmt))
        product, magnitude = operands[0] @ operands[1], np.abs(operands[0]) @ np.abs(operands[1])
        # each operand is rounded once when divided by its scale, the sum of k products k times, the bias twice
        k = operands[0].shape[1]
        bound = (k + 4) * 2.0**-24 * magnitude + 2.0**-23 * np.abs(result.numpy()) + 2.0**-22
        assert (np.abs(result.numpy() - product) <= bound).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 32), (37, 32), (5, 7, 32), (2, 8, 32), (32,), (0, 32), (4, 0, 32)])
def test_every_gemm_of_any_batch_has_aligned_dimensions_and_the_value_of_padding_by_hand(recipe, shape):
    layer = linear(recipe)
    x = torch.randn(shape)
    out, grad_input, gemms = run(layer, x)
    assert out.shape == (*shape[:-1], 48)
    assert grad_input.shape == shape
    for (a, _), (b, _) in gemms:
        assert [d % 16 for d in (*a.shape, *b.shape)] == [0, 0, 0, 0]
    weight_grad, bias_grad = layer.weight.grad.clone(), layer.bias.grad.clone()
    assert weight_grad.any() == bool(x.numel())
    tokens = x.reshape(-1, 32)
    padded = torch.zeros(-(-len(tokens) // 16) * 16, 32)
    padded[: len(tokens)] = tokens
    grad = torch.zeros(len(padded), 48)
    grad[: len(tokens)] = 1
    want, want_grad_input, _ = run(layer, padded, grad)
    torch.testing.assert_close(out.reshape(-1, 48), want[: len(tokens)], rtol=0, atol=0)
    torch.testing.assert_close(grad_input.reshape(-1, 32), want_grad_input[: len(tokens)], rtol=0, atol=0)
    torch.testing.assert_close(weight_grad, layer.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(bias_grad, layer.bias.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["tensorwise", "e4m3"])
def test_a_weight_is_encoded_for_the_wire_as_torchao_does(recipe, dtype):
    """To the bit; compiled, as on CUDA, too: by one graph for all sizes."""
    wire = linear(recipe).wire_format
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(formats.encode, backend="aot_eager", fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, -1e4, 2.0**-9, 2.0**-10, np.inf, -np.inf, np.nan])
    for size, by in ((160, 1.0), (48, 1.7), (1008, 1e-30), (16, 3e5)):
        values = torch.cat([edges, torch.randn(size, generator=generator) * 100]).to(dtype)
        factor = torch.tensor(by)
        coded = hp_tensor_and_scale_to_float8(values, factor, wire.dtype, wire.mm_config, GemmInputRole.WEIGHT)
        expected = coded._data.view(torch.uint8)
        assert torch.equal(wire.encode(values, factor).view(torch.uint8), expected)
        assert torch.equal(compiled(values, factor, wire.dtype).view(torch.uint8), expected)
    assert counters["stats"]["unique_graphs"] == 1
