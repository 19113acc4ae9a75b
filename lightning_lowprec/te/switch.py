"""Give a TELayer another precision in place: Parameters, optimizer and hooks stay.

:mod:`~lightning_lowprec.te.phases` says which products can run in high precision.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, final

from torch import nn

from lightning_lowprec.conversion.gemms import ALL_GEMMS, NO_GEMM, InBF16
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics.wire_format import wire_changed
from lightning_lowprec.te import recipes
from lightning_lowprec.te.layer import HIGH_PRECISION, TELayer
from lightning_lowprec.te.layer_recipes import LayerRecipes
from lightning_lowprec.te.phases import BACKWARD, refusal
from lightning_lowprec.te.wire_format import wire_format_of


@final
class _State:
    """The recipe of a layer, and what a recipe and a phase compute in high precision."""

    def __init__(self, recipe: Any, is_own: bool, own_gemms: InBF16 = NO_GEMM) -> None:
        self.recipe, self.is_own, self.own_gemms = recipe, is_own, own_gemms
        self.phase_gemms: InBF16 = NO_GEMM


_states: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()
"""Recipes hold functions of users, which may not pickle, so layers do not hold them here."""


def note_recipes(model: nn.Module, recipe: Any, plan: Plan, per_layer: LayerRecipes | None) -> None:
    """Note the recipe of every TELayer of a model that was converted.

    Args:
        model: the model.
        recipe: the recipe object of the plugin's context.
        plan: the plan of the model.
        per_layer: the recipes per layer, or None.
    """
    for fqn, found in model.named_modules():
        if not isinstance(found, TELayer):
            continue
        layer: Any = found
        own = None if per_layer is None or fqn not in plan.recipes else per_layer.made[plan.recipes[fqn].name or ""]
        if own is not None:
            layer.token_alignment = recipes.alignment_of(own)
            layer.wire_format = None if layer.in_by_out else wire_format_of(own)
            layer.gemm_bias_unfused_add = recipes.kind_of(own) == recipes.CUSTOM and layer.bias is not None
        _states[layer] = _State(recipe if own is None else own, own is not None and own is not recipe)
        _update(layer)


def recipe_of_forward(layer: nn.Module) -> Any:
    """Return the recipe of a TELayer's forward; None: the layer's recipe has the forward in high precision.

    A copy of a layer, which is not noted, has the recipe of its last forward.
    """
    found: Any = layer
    state = _states.get(layer)
    if state is None:
        return None if found.own_recipe is HIGH_PRECISION else found.own_recipe or found.fp8_meta.get("recipe")
    return None if "forward" in state.own_gemms else state.recipe


def set_phase(layer: nn.Module, gemms: InBF16) -> None:
    """Compute these products of a TELayer in high precision, beside those of the layer's recipe.

    Raises:
        ValueError: Transformer Engine cannot do so.
    """
    if isinstance(layer, TELayer):  # norms have no products
        _states[layer].phase_gemms = gemms
        _update(layer)


def reconfigure(layer: nn.Module, recipe: LayerRecipe) -> None:
    """Give a TELayer another recipe, between two optimizer steps.

    Args:
        layer: a TELayer.
        recipe: ``name`` is a kind of recipe, or None for the recipe that the layer has.

    Raises:
        ValueError: Transformer Engine cannot compute so, the layer's features do not fit, or the recipe has a history.
    """
    assert isinstance(layer, TELayer)
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
