"""How layers of Transformer Engine round their weights in the forward. Importing this module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from lightning_lowprec.numerics.weight_rounding import WeightRounding, exponent_scale, nearest_scale
from lightning_lowprec.te.fp8_weight import FrozenWeight

OF_KIND: Final[Mapping[str, WeightRounding]] = {
    "delayed": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "current": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "block": WeightRounding(scale_per="block", scale_of=exponent_scale),
}
"""By recipe. Delayed scaling has older scales while it trains; the scale of the weight at hand is never worse."""
_STORED: Final = WeightRounding(scale_per="tensor", scale_of=exponent_scale)


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return the rounding of a TELinear's weight; other layers, and recipes with a scale per 32 values, have none."""
    if isinstance(getattr(layer, "weight", None), FrozenWeight):
        return {"weight": _STORED}
    from lightning_lowprec.te.linear import TELinear
    from lightning_lowprec.te.switch import recipe_of_forward

    rounding = _of_recipe(recipe_of_forward(layer)) if isinstance(layer, TELinear) else None
    return {} if rounding is None else {"weight": rounding}


def _of_recipe(recipe: Any) -> WeightRounding | None:
    if recipe is None:
        return None
    if recipe.delayed():
        return OF_KIND["delayed"]
    if recipe.float8_current_scaling():
        power_of_2 = recipe.fp8_quant_fwd_weight.power_2_scale
        return WeightRounding(scale_per="tensor", scale_of=exponent_scale if power_of_2 else nearest_scale)
    if recipe.float8_block_scaling():
        power_of_2 = recipe.fp8_quant_fwd_weight.power_2_scale
        return WeightRounding(scale_per="block", scale_of=exponent_scale if power_of_2 else nearest_scale)
    return None
