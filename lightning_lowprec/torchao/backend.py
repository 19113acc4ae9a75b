"""The entry of the torchao backend in the registry: everything that the rest of the package knows about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final, get_args

from torch import nn

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from lightning_lowprec.conversion.gemms import InBF16
from lightning_lowprec.conversion.name_suffixes import FP16
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics.casts import LayerNumerics
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.precision import half_norms
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.plugin import BACKEND as NAME
from lightning_lowprec.torchao.plugin import NAMES, FP8TorchAO, Recipe

_SUMMARIES: Final = {
    "fp8-tensorwise": "torchao's tensorwise recipe: one scale per tensor, gradients in e5m2",
    "fp8-e4m3-torchao": "torchao, one scale per tensor, e4m3 everywhere",
    "fp8-rowwise": "torchao's rowwise recipe: one scale per row, e4m3 everywhere",
    "fp8-rowwise-gw-hp": "rowwise with the weight gradient in high precision, the most accurate",
}


def _revert(model: nn.Module) -> None:
    half_norms.release(model)
    if any(BACKEND.owns(module) for module in model.modules()):  # then torchao is imported already
        from lightning_lowprec.torchao import experts, linear

        experts.revert(model)
        linear.revert(model)


def _numerics(layer: nn.Module) -> LayerNumerics | str:
    from lightning_lowprec.torchao.casts import numerics_of

    return numerics_of(layer)


def _weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    from lightning_lowprec.torchao.rounding import weight_roundings

    return weight_roundings(layer)


def _rounding_of(recipe: str) -> WeightRounding:
    from lightning_lowprec.torchao.rounding import of_recipe

    by_row = recipe != "tensorwise"
    return of_recipe(by_row, power_of_2=by_row)


_ROWS: Final[Mapping[str, RecipeKey]] = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise-gw-hp",
}
"""For each recipe, the row of the table of what runs where."""


def _reconfigure(layer: nn.Module, recipe: LayerRecipe) -> None:
    from lightning_lowprec.torchao.switch import reconfigure

    reconfigure(layer, recipe)


def _set_phase(layer: nn.Module, gemms: InBF16) -> None:
    from lightning_lowprec.torchao.switch import set_phase

    set_phase(layer, gemms)


_NAMES: Final = {
    name: PrecisionName(
        plugin=FP8TorchAO,
        options={"recipe": recipe, "fp8_format": fp8_format},
        summary=_SUMMARIES[name],
        fp16=recipe == "tensorwise",
        masters=True,
        lacks={} if recipe == "tensorwise" else {FP16: "its kernels round their output through bf16"},
        gains=recipe,
        gathers_fp8=recipe == "tensorwise",
        conv1d="gathered",
        pads=False,
        experts=None,
        weight_rounding=partial(_rounding_of, recipe),
        hardware_recipe=_ROWS[recipe],
    )
    for (recipe, fp8_format), name in NAMES.items()
}
_HYBRID: Final = replace(_NAMES["fp8-tensorwise"], summary="another name of fp8-tensorwise")


BACKEND: Final = Backend(
    name=NAME,
    title="torchao",
    names={**_NAMES, "fp8-hybrid-torchao": _HYBRID},
    suffix="-torchao",
    recipes={recipe: recipe == "tensorwise" for recipe in get_args(Recipe)},
    module="torchao.float8",
    distribution="torchao",
    layers_from=("lightning_lowprec.torchao.",),
    revert=_revert,
    reconfigure=_reconfigure,
    set_phase=_set_phase,
    numerics=_numerics,
    weight_roundings=_weight_roundings,
)
