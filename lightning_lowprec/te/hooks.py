"""Functions of the registry entry: give a layer another precision in place, and say how a layer rounds its tensors.

Importing this module imports no Transformer Engine; the functions get layers that Transformer Engine's backend owns.

Transformer Engine's own inspection (``nvdlfw_inspect``) takes layers that were built after it was turned on, and our
layers were torch's before. With a scale per block of values, only largest values and the error of the output are
measured.
"""

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import ALL_GEMMS, NO_GEMM, InBF16, LayerRecipe
from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import power_of_two_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.weight_rounding import WeightRounding, nearest_scale
from lightning_lowprec.numerics.wire_format import wire_changed
from lightning_lowprec.private.transformer_engine import scale_state
from lightning_lowprec.te import recipes
from lightning_lowprec.te.fp8_weight import Fp8Weight, FrozenWeight, wire_format_of
from lightning_lowprec.te.recipes import BACKWARD, HIGH_PRECISION, LayerRecipes, refusal

_OF_KIND: Final[Mapping[str, WeightRounding]] = {
    "delayed": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "current": WeightRounding(scale_per="tensor", scale_of=nearest_scale),
    "block": WeightRounding(scale_per="block", scale_of=power_of_two_scale),
}
"""By recipe. Delayed scaling has older scales while it trains; the scale of the weight at hand is never worse."""
_STORED: Final = WeightRounding(scale_per="tensor", scale_of=power_of_two_scale)
_TENSORS: Final = {
    "input": ("forward", 0, "fp8_quant_fwd_inp"),
    "weight": ("forward", 1, "fp8_quant_fwd_weight"),
    "gradient": ("backward", 0, "fp8_quant_bwd_grad"),
}
"""Of a product: the pass, the place among the delayed scales of the pass, and the field of current scaling."""


@final
@dataclass
class _State:
    """The recipe of a layer, and what a recipe and a phase compute in high precision."""

    recipe: Any
    is_own: bool
    own_gemms: InBF16 = NO_GEMM
    phase_gemms: InBF16 = NO_GEMM


_states: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()
"""Recipes hold functions of users, which may not pickle, so layers do not hold them here."""


def rounding_of(kind: str) -> WeightRounding | None:
    """Return how the forward of a recipe rounds weights; None: not per tensor and not per block."""
    return _OF_KIND.get(kind)


def note_recipes(model: nn.Module, recipe: Any, plan: Plan, per_layer: LayerRecipes | None) -> None:
    """Note the recipe of every TELayer of a model that was converted: its own, or ``recipe``, that of the context."""
    from lightning_lowprec.te.layer import TELayer

    for fqn, module in model.named_modules():
        if not isinstance(module, TELayer):
            continue
        layer: Any = module
        own = None if per_layer is None or fqn not in plan.recipes else per_layer.by_name[plan.recipes[fqn].name or ""]
        if own is not None:
            layer.token_alignment = recipes.alignment_of(own)
            layer.wire_format = None if layer.in_by_out else wire_format_of(own)
            layer.gemm_bias_unfused_add = recipes.kind_of(own) == recipes.CUSTOM and layer.bias is not None
        _states[layer] = _State(recipe if own is None else own, own is not None and own is not recipe)
        _update(layer)


def _recipe_of_forward(layer: Any) -> Any:
    """Return the recipe of a TELayer's forward; None: the layer's recipe has the forward in high precision.

    A copy of a layer, which is not noted, has the recipe of its last forward.
    """
    state = _states.get(layer)
    if state is None:
        return None if layer.own_recipe is HIGH_PRECISION else layer.own_recipe or layer.fp8_meta.get("recipe")
    return None if "forward" in state.own_gemms else state.recipe


def set_phase(layer: Any, gemms: InBF16) -> None:
    """Compute these products of a TELayer in high precision, beside those of its recipe, or raise ValueError."""
    if hasattr(layer, "own_recipe"):  # norms have no products
        _states[layer].phase_gemms = gemms
        _update(layer)


def reconfigure(layer: Any, recipe: LayerRecipe) -> None:
    """Give a TELayer another recipe, between two optimizer steps; a recipe without a name keeps the layer's.

    Transformer Engine may not compute so, the features may not fit, or the recipe may have a history: ValueError.
    """
    state = _states[layer]
    if recipe.name is not None:
        made = recipes.make_recipe(recipe.name)
        multiple = recipes.alignment_of(made)
        if made.delayed():
            raise ValueError(
                "`recipe='delayed'` is not possible for one layer during a run: its scales need a history."
            )
        if layer.in_features % multiple or layer.out_features % multiple:
            raise ValueError(
                f"`recipe={recipe.name!r}` needs features that are multiples of {multiple}, and the layer has"
                f" {layer.in_features} -> {layer.out_features}. Use another recipe, or 'bf16'."
            )
        state.recipe, state.is_own = made, True
        layer.token_alignment = multiple
    state.own_gemms = recipe.in_bf16
    _update(layer)


def _update(layer: Any) -> None:
    state = _states[layer]
    gemms = state.own_gemms | state.phase_gemms
    if (reason := refusal(gemms, state.recipe)) is not None:
        raise ValueError(f"`gemms` is not possible: {reason}.")
    before = layer.own_recipe
    if gemms == ALL_GEMMS:
        layer.own_recipe = HIGH_PRECISION
    elif gemms == BACKWARD:
        layer.own_recipe = copy.copy(state.recipe)
        layer.own_recipe.backward_override = "high_precision"
    else:
        layer.own_recipe = state.recipe if state.is_own else None
    if layer.own_recipe is not before:
        layer._fp8_workspaces.clear()
        if layer.weight_cache is not None:
            layer.weight_cache.forget()
        wire_changed(layer)


# ---- how a layer rounds its tensors


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
    weight = layer._weight()
    gathered = isinstance(weight, Fp8Weight)
    if isinstance(weight, Fp8Weight) and isinstance(casts["weight"], Cast):
        _, gathered_scale = weight.codes_and_scale()
        casts["weight"] = Cast(dtype=casts["weight"].dtype, scale_of=lambda amax: gathered_scale)
    return LayerNumerics(**casts, values=None if gathered else weight)


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
    if isinstance(getattr(layer, "weight", None), FrozenWeight):
        return {"weight": _STORED}
    from lightning_lowprec.te.layer import TELinear

    recipe = _recipe_of_forward(layer) if isinstance(layer, TELinear) else None
    if recipe is None:
        return {}
    if recipe.delayed():
        return {"weight": _OF_KIND["delayed"]}
    kind = "current" if recipe.float8_current_scaling() else "block"
    if kind == "block" and not recipe.float8_block_scaling():
        return {}
    power_of_2 = recipe.fp8_quant_fwd_weight.power_2_scale
    return {"weight": replace(_OF_KIND[kind], scale_of=power_of_two_scale if power_of_2 else nearest_scale)}
