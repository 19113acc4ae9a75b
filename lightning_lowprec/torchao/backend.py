"""The entry of the torchao backend in the registry: everything that the rest of the package knows about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Literal, get_args

from lightning_lowprec.conversion.backends import Backend, PrecisionName, later
from lightning_lowprec.conversion.gains import Recipe
from lightning_lowprec.conversion.name_formats import HYBRID, all_in
from lightning_lowprec.conversion.name_suffixes import FP16
from lightning_lowprec.runs_where import RecipeKey

NAME: Final = "torchao"
FP8Format = Literal["hybrid", "e4m3"]
NAMES: Final[Mapping[tuple[Recipe, FP8Format], str]] = {
    ("tensorwise", "hybrid"): "fp8-tensorwise",
    ("tensorwise", "e4m3"): "fp8-e4m3-torchao",
    ("rowwise", "e4m3"): "fp8-rowwise",
    ("rowwise_with_gw_hp", "e4m3"): "fp8-rowwise-gw-hp",
}
"""The name for ``precision=`` of each recipe and format."""
_SUMMARIES: Final = {
    "fp8-tensorwise": "torchao's tensorwise recipe: one scale per tensor, gradients in e5m2",
    "fp8-e4m3-torchao": "torchao, one scale per tensor, e4m3 everywhere",
    "fp8-rowwise": "torchao's rowwise recipe: one scale per row, e4m3 everywhere",
    "fp8-rowwise-gw-hp": "rowwise with the weight gradient in high precision, the most accurate",
}
_ROWS: Final[Mapping[str, RecipeKey]] = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise-gw-hp",
}
"""For each recipe, the row of the table of what runs where."""
_FORMATS: Final = {
    "fp8-tensorwise": HYBRID,
    "fp8-e4m3-torchao": all_in("e4m3", fsdp2="e4m3"),
    "fp8-rowwise": all_in("e4m3"),
    "fp8-rowwise-gw-hp": replace(all_in("e4m3"), grad_weight="bf16"),
}
_NAMES: Final = {
    name: PrecisionName(
        plugin_class=".torchao.fp8:FP8TorchAO",
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
        layer_recipes=get_args(Recipe),
        weight_rounding=partial(later(".torchao.hooks:rounding_of"), recipe != "tensorwise", recipe != "tensorwise"),
        hardware_recipe=_ROWS[recipe],
        formats=_FORMATS[name],
    )
    for (recipe, fp8_format), name in NAMES.items()
}
_HYBRID: Final = replace(_NAMES["fp8-tensorwise"], summary="another name of fp8-tensorwise")
_PROTOTYPES: Final = {
    "int8-mixed": PrecisionName(
        plugin_class=".torchao.one_format:Int8TorchAO",
        summary="torchao's int8 linear layers, a scale per row (prototype; Ampere, Ada, Hopper)",
        fp16=True,
        masters=True,
        conv1d="converted",
        layer_recipes=("int8",),
        hardware_recipe="int8",
        formats=all_in("int8"),
    ),
    "mxfp8-torchao": PrecisionName(
        plugin_class=".torchao.one_format:MXFP8TorchAO",
        summary="torchao, a power-of-two scale per 32 values, e4m3 (prototype; Blackwell, else emulated)",
        masters=True,
        lacks={FP16: "its kernels take and return bf16"},
        alignment=32,
        conv1d="converted",
        layer_recipes=("mxfp8",),
        hardware_recipe="torchao-mxfp8",
        formats=all_in("e4m3"),
    ),
}


BACKEND: Final = Backend(
    name=NAME,
    title="torchao",
    names={**_NAMES, "fp8-hybrid-torchao": _HYBRID, **_PROTOTYPES},
    suffix="-torchao",
    recipes={**{recipe: recipe == "tensorwise" for recipe in get_args(Recipe)}, "int8": False, "mxfp8": False},
    module="torchao.float8",
    distribution="torchao",
    layers_from=("lightning_lowprec.torchao.",),
    revert=later(".torchao.hooks:revert"),
    reconfigure=later(".torchao.hooks:reconfigure"),
    cuts=later(".torchao.hooks:cuts"),
    set_phase=later(".torchao.hooks:set_phase"),
    numerics=later(".torchao.hooks:numerics_of"),
    weight_roundings=later(".torchao.hooks:weight_roundings"),
)
