"""Some GEMMs of a layer in bf16: each GEMM is bit for bit that of `bf16-mixed`, or that of the plain recipe."""

from itertools import chain, combinations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO
from lightning_lowprec import plain as made_plain

BF16_ROUNDING = 2**-7
GEMMS = ("forward", "grad_input", "grad_weight")
SUBSETS = list(chain.from_iterable(combinations(GEMMS, n) for n in range(3)))


def plain(dtype=torch.float32, conv1d=False):
    """Return a Linear, or the Conv1D that computes the same."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, dtype=dtype)
    if not conv1d:
        return linear
    conv = Conv1D(48, 32).to(dtype)
    conv.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    return conv


def converted(recipe="tensorwise", codes=None, dtype=torch.float32, in_bf16=(), conv1d=False, emulate=True):
    layer = plain(dtype, conv1d)
    recipes = {"0": {"recipe": recipe, **dict.fromkeys(in_bf16, "bf16")} if in_bf16 else recipe}
    plugin = FP8TorchAO(recipes, weight_codes=codes or "per_gemm", emulate=emulate, weights="keep")
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(nn.Sequential(layer))
    return layer


def results(layer, tokens=13):
    """Output, and the gradients of input, weight and bias for one gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 32, generator=generator).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    gradient = torch.randn(tokens, 48, generator=generator).bfloat16()
    return dict(zip(("forward", "grad_input", "grad_weight", "bias"), (output, *torch.autograd.grad(
        output, (x, layer.weight, layer.bias), gradient)), strict=True))  # fmt: skip


@pytest.mark.parametrize("kept", [{}, {"codes": "per_forward"}], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_each_gemm_is_bit_for_bit_that_of_bf16_mixed_or_of_the_recipe(recipe, kept):
    if kept and recipe != "tensorwise":
        kept = {}
    for dtype in (torch.float32, torch.bfloat16):
        high, low = results(plain(dtype)), results(converted(recipe, **kept, dtype=dtype))
        assert not any(torch.equal(high[gemm], low[gemm]) for gemm in GEMMS if (recipe, gemm) != (
            "rowwise_with_gw_hp", "grad_weight"))  # fmt: skip
        for gemms in SUBSETS:
            found = results(converted(recipe, **kept, dtype=dtype, in_bf16=gemms))
            for name, tensor in found.items():
                expected = high if name in gemms or name == "bias" else low
                assert torch.equal(tensor, expected[name]), (gemms, name, dtype)
                assert tensor.dtype == expected[name].dtype


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("tensorwise", {}),
        ("tensorwise", {"codes": "per_forward"}),
        ("rowwise", {}),
        ("rowwise_with_gw_hp", {}),
    ],
    ids=str,
)
def test_each_gemm_of_a_conv1d_is_that_of_a_linear_with_the_transposed_weight(recipe, options, emulate):
    """In every subset; a product in bf16 is that of ``bf16-mixed``."""
    if not emulate and recipe != "tensorwise" and torch.__version__ < "2.13":
        pytest.skip("this torch has no rowwise FP8 kernel for CPU (2.13 has)")
    for gemms in SUBSETS:
        linear, conv = (
            converted(recipe, **options, emulate=emulate, in_bf16=gemms, conv1d=conv1d) for conv1d in (False, True)
        )
        high = plain(conv1d=True)
        weight, bias = conv.weight, conv.bias
        for tokens in (13, 32):
            found, expected = results(conv, tokens), results(linear, tokens)
            assert found["grad_weight"].is_contiguous(), "a transposed gradient would be copied"
            for name, tensor in found.items():
                other = expected[name].t() if name == "grad_weight" else expected[name]
                # bf16 products sum in the order of a layout: on a CPU without bf16 instructions one rounding differs
                in_bf16 = name in gemms or (recipe, name) == ("rowwise_with_gw_hp", "grad_weight")
                bound = BF16_ROUNDING if in_bf16 else 0
                torch.testing.assert_close(tensor, other, rtol=bound, atol=bound, msg=f"{name}: {gemms}")
                if name in gemms:
                    assert torch.equal(tensor, results(high, tokens)[name]), (gemms, name)
            with torch.no_grad():  # the next forward computes with what is written
                for layer in (linear, conv, high):
                    layer.weight.mul_(1.1)
        assert conv.weight is weight
        assert conv.bias is bias
        assert repr(conv) == "CodedConv1D(nf=48, nx=32)"
        conv.fp8_eval = False
        assert torch.equal(conv.eval()(x := torch.randn(3, 32)), high(x))
        made_plain(conv)
        assert type(conv) is Conv1D
        assert set(vars(conv)) == set(vars(plain(conv1d=True)))


@pytest.mark.parametrize("tokens", [13, 16])
@pytest.mark.parametrize("conv1d", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("gemms", SUBSETS, ids=str)
def test_a_model_may_write_to_an_output(gemms, conv1d, tokens):
    """Falcon adds to the output of a layer without bias, in place."""
    layer, found = converted(in_bf16=gemms, conv1d=conv1d), []
    if not conv1d:
        layer.bias = None
    for add in (torch.Tensor.add_, torch.Tensor.add):
        x = torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        add(layer(x), 1).square().sum().backward()
        found += [x.grad, layer.weight.grad]
        layer.weight.grad = None
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
