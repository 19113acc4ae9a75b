"""How layers of Transformer Engine round their tensors, as far as one scale per tensor says that.

Transformer Engine's own inspection (``nvdlfw_inspect``) takes layers that were built after it was turned on, and our
layers were torch's before. With a scale per block of values, only largest values and the error of the output are
measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.private.transformer_engine import scale_state
from lightning_lowprec.te.fp8_weight import Fp8Weight
from lightning_lowprec.te.linear import TELinear

_BLOCKS: Final = "the recipe has a scale per block of values"
_FUSED: Final = "it is fused: one call of Transformer Engine computes several layers"
_INPUT, _WEIGHT, _GRADIENT = 0, 1, 0
"""The places of a layer's scales, forward and backward."""


def numerics_of(layer: nn.Module) -> LayerNumerics | str | None:
    """Return the casts of a TELinear; None for a norm. Call in or after its forward."""
    if not isinstance(layer, TELinear):
        return _FUSED if isinstance(layer, nn.Linear) else None
    if not layer.fp8:
        return EVALUATES if not layer.training else "it has not run in its precision's context"
    recipe = layer.fp8_meta["recipe"]
    if recipe.delayed():
        casts = _delayed(layer, recipe)
    elif recipe.float8_current_scaling():
        casts = _current(recipe)
    else:
        casts = dict.fromkeys(("input", "weight", "gradient"), _BLOCKS)
    if recipe.backward_override is not None:
        casts["gradient"] = HIGH
    weight = layer._weight()
    gathered = isinstance(weight, Fp8Weight)
    if gathered and isinstance(casts["weight"], Cast):
        casts["weight"] = Cast(dtype=casts["weight"].dtype, scale_of=partial(_gathered_scale, weight))
    return LayerNumerics(**casts, values=None if gathered else weight)


def _formats(recipe: Any) -> tuple[torch.dtype, torch.dtype]:
    hybrid = recipe.fp8_format.name == "HYBRID"
    return torch.float8_e4m3fn, torch.float8_e5m2 if hybrid else torch.float8_e4m3fn


def _delayed(layer: nn.Module, recipe: Any) -> dict[str, Any]:
    forward, backward = _formats(recipe)

    def cast(dtype: torch.dtype, mode: str, place: int) -> Cast:
        scale = partial(_delayed_scale, layer, mode, place)
        return Cast(dtype=dtype, scale_of=scale, may_saturate=True)

    return {
        "input": cast(forward, "forward", _INPUT),
        "weight": cast(forward, "forward", _WEIGHT),
        "gradient": cast(backward, "backward", _GRADIENT),
    }


def _delayed_scale(layer: nn.Module, mode: str, place: int, amax: Tensor) -> Tensor:
    state = scale_state(layer, mode)
    assert state is not None  # the layer's forward has made it
    scale: Tensor = state.scale[place]
    return scale


def _current(recipe: Any) -> dict[str, Any]:
    forward, backward = _formats(recipe)

    def cast(dtype: torch.dtype, params: Any) -> Cast:
        limit, power_of_2, least = torch.finfo(dtype).max, params.power_2_scale, params.amax_epsilon
        return Cast(dtype=dtype, scale_of=lambda amax: _current_scale(amax, limit, power_of_2, least))

    return {
        "input": cast(forward, recipe.fp8_quant_fwd_inp),
        "weight": cast(forward, recipe.fp8_quant_fwd_weight),
        "gradient": cast(backward, recipe.fp8_quant_bwd_grad),
    }


@compiled_on_cuda
def _current_scale(amax: Tensor, limit: float, power_of_2: bool, least: float) -> Tensor:
    """``limit / amax``, rounded down to a power of two if the recipe says so; 1 for zeros."""
    amax = amax.float().clamp(min=least)
    scale = torch.where(amax > 0, limit / amax, 1.0)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def _gathered_scale(weight: Any, amax: Tensor) -> Tensor:
    scale: Tensor = weight.inv_scale.reciprocal().squeeze()
    return scale
