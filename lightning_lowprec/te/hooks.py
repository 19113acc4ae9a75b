"""Functions of the registry entry: how a layer rounds its tensors.

Importing this module imports no Transformer Engine; the functions get layers that Transformer Engine's backend owns.

Transformer Engine's own inspection (``nvdlfw_inspect``) takes layers that were built after it was turned on, and our
layers were torch's before. With a scale per block of values, only largest values and the error of the output are
measured.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import power_of_two_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.weight_rounding import WeightRounding, nearest_scale
from lightning_lowprec.private.transformer_engine import scale_state

_OF_KIND: Final[Mapping[str, WeightRounding]] = {
    "delayed": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "current": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "block": WeightRounding(scale_per="block", scale_of=power_of_two_scale),
}
"""By recipe. Delayed scaling has older scales while it trains; the scale of the weight at hand is never worse."""
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
    recipe = layer.fp8_meta["recipe"]
    casts = _casts(layer, recipe)
    if recipe.backward_override is not None:
        casts["gradient"] = HIGH
    return LayerNumerics(**casts, values=layer.weight)


def _casts(layer: nn.Module, recipe: Any) -> dict[str, Any]:
    """Return the casts of a layer's tensors by their names in ``LayerNumerics``, or why they are not known."""
    if not (recipe.delayed() or recipe.float8_current_scaling()):
        return dict.fromkeys(_TENSORS, "the recipe has a scale per block of values")
    casts = {}
    for name in _TENSORS:
        in_e5m2 = name == "gradient" and recipe.fp8_format.name == "HYBRID"
        dtype = torch.float8_e5m2 if in_e5m2 else torch.float8_e4m3fn
        scale_of = partial(_scale_of, layer, recipe, name, torch.finfo(dtype).max)
        casts[name] = Cast(dtype=dtype, scale_of=scale_of, may_saturate=recipe.delayed())
    return casts


def _scale_of(layer: nn.Module, recipe: Any, name: str, limit: float, amax: Tensor) -> Tensor:
    mode, place, field = _TENSORS[name]
    if recipe.delayed():
        return scale_state(layer, mode).scale[place]  # type: ignore[no-any-return]  # the layer's forward has made it
    params = getattr(recipe, field)
    return _current_scale(amax, limit, params.power_2_scale, params.amax_epsilon)


@compiled_on_cuda
def _current_scale(amax: Tensor, limit: float, power_of_2: bool, least: float) -> Tensor:
    """``limit / amax``, rounded down to a power of two if the recipe says so; 1 for zeros."""
    amax = amax.float().clamp(min=least)
    scale = torch.where(amax > 0, limit / amax, 1.0)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return the rounding of a TELinear's weight; other layers, and recipes with a scale per 32 values, have none."""
    from lightning_lowprec.te.layer import TELinear

    if not isinstance(layer, TELinear):
        return {}
    recipe = layer.recipe
    if recipe.delayed():
        return {"weight": _OF_KIND["delayed"]}
    kind = "current" if recipe.float8_current_scaling() else "block"
    if kind == "block" and not recipe.float8_block_scaling():
        return {}
    power_of_2 = recipe.fp8_quant_fwd_weight.power_2_scale
    return {"weight": replace(_OF_KIND[kind], scale_of=power_of_two_scale if power_of_2 else nearest_scale)}
