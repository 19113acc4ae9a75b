"""Values that are not finite stay visible in FP8, and gradients are never clipped."""

import pytest
import torch
import torch.nn.functional as F

from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.numerics.formats import E4M3, power_of_two_scale, visible_scale
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.mxfp8 import MXFP8

TOKENS, WIDTH, VOCABULARY = 32, 32, 64


def data(scale=1.0):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH) * scale, torch.randn(VOCABULARY, WIDTH)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,))


def rounded(values):
    """Values with a mantissa of three bits, by a scale that is a power of two: e4m3 without subnormal numbers."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


@pytest.mark.parametrize(
    ("z_loss", "scale"),
    [(1e-4, 1), (1e-2, 1), (0.1, 1), (0.5, 1), (1.0, 1), (30.0, 1), (1e-3, 300), (1e-4, 3000)],
)
def test_gradients_of_a_z_loss_are_not_clipped(z_loss, scale):
    """By autograd in float32, from logits of rounded hidden states and weights: large logits amplify the rounding."""
    hidden, weight, target = data(scale)
    logits = (rounded(hidden) @ rounded(weight).t()).requires_grad_()
    loss = F.cross_entropy(logits, target) + z_loss * torch.logsumexp(logits, -1).square().mean()
    loss.backward()
    a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(a, b, target, z_loss=z_loss, fp8=True).backward()
    for ours, expected in ((a.grad, logits.grad @ weight), (b.grad, logits.grad.t() @ hidden)):
        assert (ours - expected).norm() < 0.15 * expected.norm()  # two bits of mantissa round by at most 1/8


def test_a_bias_is_in_the_bound_of_the_gradients():
    hidden, weight, target = data(0.01)
    bias = torch.full((VOCABULARY,), 500.0)
    a = hidden.clone().requires_grad_()
    linear_cross_entropy(a, weight, target, bias=bias, z_loss=0.1, fp8=True).backward()
    b = hidden.clone().requires_grad_()
    logits = F.linear(b, weight, bias)
    (F.cross_entropy(logits, target) + 0.1 * torch.logsumexp(logits, -1).square().mean()).backward()
    assert (a.grad - b.grad).norm() < 0.15 * b.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_the_loss_shows_what_is_not_finite(where, value, dtype):
    hidden, weight, target = data()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    {"hidden": hidden, "weight": weight}[where][3, 4] = value
    loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target, fp8=True)
    loss.backward()
    assert loss.isnan()
    assert not weight.grad.isfinite().all()
    assert not hidden.grad.isfinite().all()


@pytest.mark.parametrize("vocabulary", [16, 17, 48, 64])
def test_a_head_that_is_stored_transposed(vocabulary):
    torch.manual_seed(0)
    stored, hidden = torch.randn(WIDTH, vocabulary), torch.randn(8, WIDTH)
    target = torch.randint(0, vocabulary, (8,))
    losses = []
    for weight in (stored.t(), stored.t().contiguous()):
        weight = weight.detach().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, fp8=True)
        loss.backward()
        losses.append((loss, weight.grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])


def test_scales_are_nan_only_where_values_are_not_finite():
    amax = torch.tensor([0.0, 1e-30, 1.0, 448.0, 3e38, float("inf"), float("nan")])
    scale = visible_scale(amax)
    assert torch.equal(scale[:5], power_of_two_scale(amax[:5], E4M3))
    assert scale[0] == 1
    assert scale[5:].isnan().all()


@pytest.mark.skipif(prototype_refusal("mxfp8") is not None, reason=f"{prototype_refusal('mxfp8')}")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_tile_of_mxfp8_shows_inf(value):
    """In the products of forward and backward, where the tile takes part; other tiles stay finite."""
    weight, x = torch.randn(64, 64), torch.randn(32, 64)
    weight[40, 3] = value
    arithmetic = MXFP8(emulate=True)
    codes = arithmetic.operand(weight, "weight", torch.float32)
    tokens = arithmetic.operand(x, "input", torch.float32)
    output = arithmetic.multiply(tokens.rows(), codes.rows(), torch.float32, "output")
    assert output[:, :32].isfinite().all()
    assert not output[:, 32:].isfinite().any()
