"""How a layer rounds its tensors: for the monitor and for exports. Importing this imports no Transformer Engine.

With a scale per block of values, only largest values and the error of the output are measured.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import power_of_two_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.weight_rounding import WeightRounding, nearest_scale
from lightning_lowprec.private.transformer_engine import scale_state
from lightning_lowprec.te.recipes import kind_of

_PER_TENSOR: Final = WeightRounding(scale_per="tensor", scale_of=nearest_scale)
_OF_KIND: Final = {
    "delayed": _PER_TENSOR,  # it has older scales while it trains; the scale of the weight at hand is never worse
    "current": _PER_TENSOR,
    "block": WeightRounding(scale_per="block", scale_of=power_of_two_scale),
}
_TENSORS: Final = {
    "input": ("forward", 0, "fp8_quant_fwd_inp"),
    "weight": ("forward", 1, "fp8_quant_fwd_weight"),
    "gradient": ("backward", 0, "fp8_quant_bwd_grad"),
}
"""Of a product: the pass, the place among the delayed scales of the pass, and the field of current scaling."""


def rounding_of(kind: str) -> WeightRounding | None:
    """Return how the forward of a recipe rounds weights; None: not per tensor and not per block."""
    return _OF_KIND.get(kind)


def numerics_of(layer: nn.Module) -> LayerNumerics | str | None:
    """Return the casts of a TELinear; None for a norm. Call in or after its forward."""
    from lightning_lowprec.te.layer import TELinear

    if not isinstance(layer, TELinear):
        return None
    if not layer.fp8:
        return EVALUATES if not layer.training else "it has not run in its precision's context"
    casts = {name: _cast(layer, name) for name in _TENSORS}
    if layer.recipe.backward_override is not None:
        casts["gradient"] = HIGH
    return LayerNumerics(**casts, values=layer.weight)


def _cast(layer: Any, name: str) -> Cast | str:
    """Return the cast of a tensor of a layer, by its name in ``LayerNumerics``, or why the cast is not known."""
    recipe, kind = layer.recipe, kind_of(layer.recipe)
    if kind not in ("delayed", "current"):
        return "the recipe has a scale per block of values"
    in_e5m2 = name == "gradient" and recipe.fp8_format.name == "HYBRID"
    dtype = torch.float8_e5m2 if in_e5m2 else torch.float8_e4m3fn
    mode, place, field = _TENSORS[name]
    if kind == "delayed":  # the layer's forward has made the scale
        return Cast(dtype=dtype, scale_of=lambda amax: scale_state(layer, mode).scale[place], may_saturate=True)
    chosen = getattr(recipe, field)
    options = torch.finfo(dtype).max, chosen.power_2_scale, chosen.amax_epsilon
    return Cast(dtype=dtype, scale_of=lambda amax: _current_scale(amax, *options))


@compiled_on_cuda
def _current_scale(amax: Tensor, limit: float, power_of_2: bool, least: float) -> Tensor:
    """``limit / amax``, rounded down to a power of two if the recipe says so; 1 for zeros."""
    amax = amax.float().clamp(min=least)
    scale = torch.where(amax > 0, limit / amax, 1.0)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return the rounding of a TELinear's weight; other layers, and recipes with a scale per 32 values, have none."""
    from lightning_lowprec.te.layer import TELinear

    rounding = rounding_of(kind_of(layer.recipe)) if isinstance(layer, TELinear) else None
    if rounding is None:
        return {}
    chosen = getattr(layer.recipe, "fp8_quant_fwd_weight", None)  # delayed scaling has none
    if chosen is not None:
        rounding = replace(rounding, scale_of=power_of_two_scale if chosen.power_2_scale else nearest_scale)
    return {"weight": rounding}
