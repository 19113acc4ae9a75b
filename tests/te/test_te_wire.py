"""The scales of gathered weights at the edges of float32, against Transformer Engine's reference of its kernel."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformer_engine.common.recipe import CustomRecipe, NVFP4BlockScaling
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
    CurrentScalingQuantizerRef,
    current_scaling_ref_factory,
)

from lightning_lowprec.te.fp8_weight import TEWireFormat, encode, gather_refusal, wire_format_of
from lightning_lowprec.te.recipes import make_recipe

AMAX = [0.0, 1e-45, 1e-38, 1e-36, 2.0**-20, 0.3, 1.0, 447.9, 448.0, 1e6, 3.4e38]


POWERS = [amax for amax in AMAX if not 0 < amax < 1e-35]
"""Where a power of two and its reciprocal are normal float32; ours stops at 2**126."""


@pytest.mark.parametrize(("amax", "power_of_two"), [(amax, False) for amax in AMAX] + [(amax, True) for amax in POWERS])
def test_scale(amax, power_of_two):
    values = torch.tensor([[amax, -amax / 3]])
    reference = CurrentScalingQuantizerRef(torch.float8_e4m3fn, columnwise=False, pow_2_scales=power_of_two)
    made = reference.quantize(values)
    wire = TEWireFormat(power_of_two=power_of_two)
    scale = wire.scales(values.abs().amax())
    assert scale.reciprocal().item() == pytest.approx(made.scale.item(), rel=2**-23)
    assert torch.equal(wire.encode(values, scale).view(torch.uint8), made.data.view(torch.uint8))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_the_same_to_the_bit(power_of_two):
    reference = CurrentScalingQuantizerRef(torch.float8_e4m3fn, columnwise=False, pow_2_scales=power_of_two)
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    inv_scales = torch.cat([reference.quantize(a.reshape(1, 1)).scale for a in amax])
    assert torch.equal(TEWireFormat(power_of_two=power_of_two).scales(amax).reciprocal(), inv_scales)


def test_compiled_code_encodes_the_same_bits():
    """As on CUDA: by one graph for all sizes."""
    torch._dynamo.reset()
    counters.clear()
    wire, compiled = TEWireFormat(), torch.compile(encode, backend="aot_eager", fullgraph=True, dynamic=True)
    edges = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, -1e4, 2.0**-9, 2.0**-10, torch.inf, -torch.inf, torch.nan])
    for size, scale in ((160, 1.0), (48, 1.7), (1008, 1e-30), (16, 3e5)):
        values = torch.cat([edges, torch.randn(size, generator=torch.Generator().manual_seed(0)) * 100])
        expected = wire.encode(values, torch.tensor(scale)).view(torch.uint8)
        assert torch.equal(compiled(values, torch.tensor(scale)).view(torch.uint8), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad):
    """A run that has diverged shows it."""
    values = torch.tensor([1.0, bad])
    wire = TEWireFormat()
    codes = wire.encode(values, wire.scales(values.abs().amax()))
    assert codes.float().tolist()[0] == 1.0
    assert codes.float()[1].isnan()


def test_of_a_recipe():
    assert wire_format_of(make_recipe("delayed")).power_of_two is False
    current = wire_format_of(make_recipe({"recipe": "current", "use_power_2_scales": True}))
    assert (current.power_of_two, current.least_amax) == (True, 0.0)
    custom = CustomRecipe(qfactory=current_scaling_ref_factory)
    for recipe in (make_recipe("block"), NVFP4BlockScaling(), custom):
        assert wire_format_of(recipe) is None
        assert "no single scale" in gather_refusal(recipe)
