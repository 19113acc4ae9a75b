"""How far outputs and gradients are from float32: as far as the rounding of the formats explains, and no further.

An operand's noise is the energy of its rounding error over its own energy; errors of two operands are independent, so
that the noise of a product is the sum of both. Each is computed here by searching the nearest value of the format.
"""

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TE
from tests.te import reference
from tests.te.subjects import fabric_for, te_linears

TOKENS, IN, OUT = 192, 128, 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def every_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return codes[codes.isfinite() & (codes >= 0)].unique()


E4M3, E5M2 = every_value(torch.float8_e4m3fn), every_value(torch.float8_e5m2)


def noise(x, values, rows, columns):
    """x: [M, K] -> float. Blocks of ``rows`` x ``columns`` are scaled so that the largest meets the largest value."""
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns).transpose(1, 2).double()
    scale = values.max() / blocks.abs().amax((-2, -1), keepdim=True)
    scaled = (blocks * scale).abs().contiguous()
    middles = (values[1:] + values[:-1]).double() / 2
    rounded = values.double()[torch.bucketize(scaled, middles)]
    return float(((rounded - scaled) / scale).square().sum() / x.double().square().sum())


def decibels(ratio):
    return -10 * torch.log10(torch.as_tensor(ratio)).item()


def sqnr(actual, exact):
    return decibels((actual.double() - exact).square().sum() / exact.square().sum())


def predictions(kind, x, weight, grad):
    """In decibels: output, grad_input, grad_weight."""
    if kind == "current":
        of_x, of_w = (noise(t, E4M3, *t.shape) for t in (x, weight))
        of_g = noise(grad, E5M2, *grad.shape)
        pairs = (of_x, of_w), (of_g, of_w), (of_g, of_x)
    else:
        # 16 along the reduced dimension; weights 16x16. Normal numbers are as normal after the Hadamard transform
        of_w = noise(weight, E2M1, 16, 16)
        pairs = (
            (noise(x, E2M1, 1, 16), of_w),
            (noise(grad, E2M1, 1, 16), of_w),
            (noise(grad.T, E2M1, 1, 16), noise(x.T, E2M1, 1, 16)),
        )
    return [decibels(sum(pair)) for pair in pairs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "slack", "base"),
    [("current", 0.3, "bf16"), ("current", 0.3, "fp16"), ("nvfp4", 0.6, "bf16")],  # e2m1's scales are rounded to e4m3
)
def test_noise_is_that_of_the_formats(reference_te, kind, slack, base, bias):
    torch.manual_seed(0)
    recipe = reference.current_scaling() if kind == "current" else reference.nvfp4()
    layer = nn.Linear(IN, OUT, bias=bias)
    nn.init.normal_(layer.weight, std=IN**-0.5)
    x, grad = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    exact_weight = layer.weight.detach().double()
    exact = (
        x.double() @ exact_weight.T + (layer.bias.detach().double() if bias else 0),
        grad.double() @ exact_weight,
        grad.double().T @ x.double(),
    )
    expected = predictions(kind, x, layer.weight.detach(), grad)
    fabric = fabric_for(FP8TE(recipe, base=base, loss_scale=1.0 if base == "fp16" else "auto"))
    fabric.setup(layer)
    assert te_linears(layer) == [layer]
    x.requires_grad_()
    with fabric.autocast():
        output = layer(x)
    assert output.dtype == (torch.bfloat16 if base == "bf16" else torch.float16)
    output.backward(grad.to(output.dtype))
    found = [sqnr(t.detach(), e) for t, e in zip((output, x.grad, layer.weight.grad), exact, strict=True)]
    if bias:  # exact to the rounding of the output, so it only adds energy
        expected[0] += decibels((exact[0] - layer.bias.detach().double()).square().sum() / exact[0].square().sum())
        torch.testing.assert_close(layer.bias.grad, grad.sum(0), rtol=0.02, atol=0.2)
    assert found == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize("remedy", ["FP8TorchAO", "keep="])
def test_a_gradient_of_a_gradient_raises(reference_te, remedy):
    # Transformer Engine would return a gradient without the layer's part of it
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh())
    fabric = fabric_for(FP8TE(reference.current_scaling()))
    model = fabric.setup_module(model)
    x = torch.randn(TOKENS, IN, requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"create_graph=True.*a layer of Transformer Engine.*{remedy}"):
        torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
