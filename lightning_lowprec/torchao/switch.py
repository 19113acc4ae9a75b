"""Give an FP8Layer another precision in place: Parameters, optimizer, hooks and compiled modules stay.

    recipe of the layer   own_gemms     written by `reconfigure` (the plan, a demotion)
    phase of a schedule   phase_gemms   written by `set_phase`
                               |
                               v  a product in bf16 in one of the two runs in bf16
    the layer             in_bf16       read by the forward; a compiler guards it

FSDP2 follows: a weight that a product reads in bf16 is
gathered in bf16. All ranks must switch a layer before the same forward.
"""

from __future__ import annotations

from torch import nn

from lightning_lowprec.conversion.gemms import InBF16
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics.wire_format import wire_changed
from lightning_lowprec.torchao.experts import FP8Experts
from lightning_lowprec.torchao.layer import FP8Layer


def set_phase(layer: nn.Module, gemms: InBF16) -> None:
    """Compute these products of a layer in high precision, beside those of the layer's recipe."""
    if isinstance(layer, FP8Experts):
        layer.set_phase(gemms)
        wire_changed(layer)
        return
    assert isinstance(layer, FP8Layer)
    layer.phase_gemms = gemms
    _update(layer)


def reconfigure(layer: nn.Module, recipe: LayerRecipe) -> None:
    """Give an FP8Layer another recipe; call this between two optimizer steps.

    Args:
        layer: an FP8Layer, or experts in FP8.
        recipe: ``name`` is one of torchao's recipes, or None for the recipe that the layer has.

    Raises:
        ValueError: the layer has the user's own ``config``, and ``recipe`` has a name.
    """
    if isinstance(layer, FP8Experts):
        layer.reconfigure(recipe)
        wire_changed(layer)
        return
    assert isinstance(layer, FP8Layer)
    if recipe.name is not None:
        if layer.settings is None:
            raise ValueError(
                f"`recipe={recipe.name!r}` is not possible for a layer with `config=Float8LinearConfig(...)`, which"
                " takes the place of recipes. Use `FP8TorchAO(recipe=...)`, or 'bf16'."
            )
        saves = layer.saves_weight_codes  # not where FSDP2 frees the weight
        vars(layer).update(layer.settings.of(recipe).attributes(layer.in_features, layer.out_features))
        layer.saves_weight_codes &= saves
    layer.own_gemms = recipe.in_bf16
    _update(layer)


def _update(layer: FP8Layer) -> None:
    layer.in_bf16 = tuple(sorted(layer.own_gemms | layer.phase_gemms))
    wire_changed(layer)
