"""Each GEMM of a layer is bit for bit that of torchao's own conversion, or in bf16 that of `bf16-mixed`."""

from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import lightning as L
import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import e4m3_dtype

from lightning_lowprec import FP8TorchAO, Int8TorchAO
from lightning_lowprec import plain as made_plain
from lightning_lowprec.fsdp2.options import ShardOptions
from tests.toys import convert

IN, OUT = 128, 192
GEMMS = ("forward", "grad_input", "grad_weight")
SUBSETS = [frozenset(gemms) for gemms in chain.from_iterable(combinations(GEMMS, n) for n in range(3))]
NO_MXFP8 = FP8TorchAO("mxfp8").refusal(torch.device("cpu"))
needs_mxfp8 = pytest.mark.skipif(NO_MXFP8 is not None, reason=f"{NO_MXFP8}")
PLUGINS = {
    "tensorwise": (FP8TorchAO, "tensorwise", {"weight_codes": "per_gemm"}),
    "per_forward": (FP8TorchAO, "tensorwise", {"weight_codes": "per_forward"}),
    "rowwise": (FP8TorchAO, "rowwise", {}),
    "rowwise_with_gw_hp": (FP8TorchAO, "rowwise_with_gw_hp", {}),
    "mxfp8": (FP8TorchAO, "mxfp8", {}),
    "int8": (Int8TorchAO, "int8", {}),
}
KINDS = [*list(PLUGINS)[:4], "int8", pytest.param("mxfp8", marks=needs_mxfp8)]


def plain(dtype=torch.float32, bias=True, conv1d=False):
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, bias=bias).to(dtype)
    if not conv1d:
        return linear
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(OUT, IN).to(dtype)
    conv1d.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    return conv1d


def converted(kind, layer, gemms=(), **options):
    cls, recipe, own = PLUGINS[kind]
    recipes = {"0": {"recipe": recipe, **dict.fromkeys(gemms, "bf16")}} if gemms else recipe
    convert(cls(recipes, **own, **options, weights="keep"), nn.Sequential(layer))
    return layer


def results(layer, tokens=45, autocast=True):
    generator, dtype = torch.Generator().manual_seed(1), layer.weight.dtype
    x = torch.randn(tokens, IN, generator=generator).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(x)
    gradient = torch.randn(tokens, OUT, generator=generator).to(output.dtype)
    wanted = (x, *(p for p in (layer.weight, layer.bias) if p is not None))
    return dict(zip((*GEMMS, "bias"), (output, *torch.autograd.grad(output, wanted, gradient)), strict=False))


@pytest.mark.parametrize("conv1d", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_gemm_is_bit_for_bit_that_of_bf16_mixed_or_of_the_recipe(kind, dtype, conv1d):
    high, low = results(plain(dtype, conv1d=conv1d)), results(converted(kind, plain(dtype, conv1d=conv1d)))
    alike = {gemm for gemm in GEMMS if torch.equal(high[gemm], low[gemm])}
    assert alike == ({"grad_weight"} if kind == "rowwise_with_gw_hp" else set())
    for gemms in SUBSETS:
        for name, tensor in results(converted(kind, plain(dtype, conv1d=conv1d), gemms)).items():
            expected = (high if name in gemms or name == "bias" else low)[name]
            assert torch.equal(tensor, expected), (gemms, name)
            assert tensor.dtype == expected.dtype


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"emulate": emulate}) for kind in list(PLUGINS)[:4] for emulate in (True, False)),
        ("int8", {}),
        pytest.param("mxfp8", {}, marks=needs_mxfp8),
    ],
    ids=str,
)
def test_a_conv1d_is_a_linear_with_the_transposed_weight(kind, options):
    if options == {"emulate": False} and kind.startswith("rowwise") and torch.__version__ < "2.13":
        pytest.skip("this torch has no rowwise FP8 kernel for CPU (2.13 has)")
    linear, conv = (converted(kind, plain(conv1d=conv1d), **options) for conv1d in (False, True))
    high, (weight, bias) = plain(conv1d=True), conv.parameters()
    for tokens in (13, 32):
        found, expected = results(conv, tokens), results(linear, tokens)
        assert found["grad_weight"].is_contiguous(), "a transposed gradient would be copied"
        # sums of bf16 products run in the order of a layout: one rounding differs
        error = 2**-7 if kind in ("rowwise_with_gw_hp", "mxfp8") else 0
        torch.testing.assert_close(found["grad_weight"], expected["grad_weight"].t(), rtol=error, atol=0)
        assert all(torch.equal(found[name], expected[name]) for name in ("forward", "grad_input", "bias"))
        with torch.no_grad():  # the next forward computes with what is written
            for layer in (linear, conv, high):
                layer.weight.mul_(1.1)
    assert [*conv.parameters()] == [weight, bias]
    assert repr(conv) == f"CodedConv1D(nf={OUT}, nx={IN})"
    conv.fp8_eval = False
    assert torch.equal(conv.eval()(x := torch.randn(3, IN)), high(x))
    made_plain(conv)
    assert type(conv) is type(high)
    assert set(vars(conv)) == set(vars(high))


def e4m3():
    return CastConfig(target_dtype=e4m3_dtype)


PAIRS = {
    "tensorwise": ({}, lambda: Float8LinearConfig()),
    "power of two": ({"round_scales_to_power_of_2": True}, lambda: Float8LinearConfig(round_scales_to_power_of_2=True)),
    "e4m3": (
        {"fp8_format": "e4m3"},
        lambda: Float8LinearConfig(cast_config_grad_output=e4m3(), cast_config_grad_output_for_grad_weight=e4m3()),
    ),
    **{
        recipe: ({"recipe": recipe}, partial(Float8LinearConfig.from_recipe_name, recipe))
        for recipe in ("rowwise", "rowwise_with_gw_hp")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_every_gemm_is_torchaos(name):
    options, config = PAIRS[name]
    plugin = FP8TorchAO(**options)
    assert (plugin.gathers(ShardOptions()) is None) is ("rowwise" not in name)
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    convert_to_float8_training(theirs, config=replace(config(), emulate=True))
    batch = torch.randn(16, 32)
    module = L.Fabric(accelerator="cpu", plugins=plugin).setup(ours)
    output = module(batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(batch.bfloat16())
    assert torch.equal(output, expected.float())
    output.square().mean().backward()
    expected.float().square().mean().backward()
    for (fqn, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, reference.grad), fqn
