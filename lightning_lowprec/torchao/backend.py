"""The entry of the torchao backend in the registry: everything that the rest of the package knows about it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Literal, get_args

from lightning_lowprec.conversion.backends import Backend, PrecisionName, later
from lightning_lowprec.conversion.gains import Recipe
from lightning_lowprec.conversion.name_formats import E4M3_TENSORWISE, HYBRID, Formats, all_in
from lightning_lowprec.conversion.name_suffixes import FP16

NAME: Final = "torchao"
FP8Format = Literal["hybrid", "e4m3"]
FastAccum = Literal["forward", "all", "none"]
E4M3_IN_FP16: Final = "write `plugins=FP8TorchAO(fp8_format='e4m3', base='fp16')`"


def _name(recipe: Recipe, fp8_format: FP8Format, formats: Formats, summary: str) -> PrecisionName:
    one_scale = recipe == "tensorwise"
    return PrecisionName(
        plugin_class=".torchao.fp8:FP8TorchAO",
        options={"recipe": recipe, "fp8_format": fp8_format},
        summary=summary,
        fp16=one_scale and fp8_format == "hybrid",
        masters=True,
        lacks={FP16: E4M3_IN_FP16 if one_scale else "its kernels round their output through bf16"},
        gains=recipe,
        gathers_fp8=one_scale,
        conv1d="gathered",
        pads=False,
        experts=None,
        layer_recipes=get_args(Recipe),
        weight_rounding=partial(later(".torchao.hooks:rounding_of"), "tensor" if one_scale else "row", not one_scale),
        hardware_recipe="rowwise-gw-hp" if recipe == "rowwise_with_gw_hp" else recipe,
        formats=formats,
    )


_E4M3: Final = all_in("e4m3")
_GW_HP: Final = replace(_E4M3, grad_weight="bf16")
_NAMES: Final = {
    "fp8-hybrid": _name(
        "tensorwise", "hybrid", HYBRID, "FP8 linear layers by torchao, one scale per tensor, gradients in e5m2"
    ),
    "fp8-e4m3": _name(
        "tensorwise", "e4m3", E4M3_TENSORWISE, "FP8 linear layers by torchao, one scale per tensor, e4m3 everywhere"
    ),
    "fp8-rowwise": _name("rowwise", "e4m3", _E4M3, "torchao's rowwise recipe: one scale per row, e4m3 everywhere"),
    "fp8-rowwise-gw-hp": _name(
        "rowwise_with_gw_hp", "e4m3", _GW_HP, "rowwise with the weight gradient in high precision, the most accurate"
    ),
}
NAMES: Final[Mapping[tuple[str, str], str]] = {
    (row.options["recipe"], row.options["fp8_format"]): name for name, row in _NAMES.items()
}
"""The name for ``precision=`` of each recipe and format."""
_ONE_FORMAT: Final = {
    "fp8-block": PrecisionName(
        plugin_class=".torchao.one_format:BlockTorchAO",
        summary="torchao, a scale per 128 values or 128x128 weights, e4m3, as DeepSeek-V3",
        masters=True,
        lacks={FP16: "its kernels return bf16"},
        gathers_fp8=True,
        tile=128,
        conv1d="gathered",
        experts=None,
        layer_recipes=("block",),
        hardware_recipe="torchao-block",
        weight_rounding=partial(later(".torchao.hooks:rounding_of"), "block", False),
        formats=all_in("e4m3", fsdp2="e4m3"),
    ),
    "int8-mixed": PrecisionName(
        plugin_class=".torchao.one_format:Int8TorchAO",
        format="int8",
        summary="torchao's int8 linear layers, a scale per row (prototype; Ampere, Ada, Hopper)",
        masters=True,
        lacks={FP16: "write `plugins=Int8TorchAO(base='fp16')`"},
        conv1d="converted",
        layer_recipes=("int8",),
        hardware_recipe="int8",
        formats=all_in("int8"),
    ),
    "mxfp8": PrecisionName(
        plugin_class=".torchao.one_format:MXFP8TorchAO",
        format="MXFP8",
        summary="torchao, a power-of-two scale per 32 values, e4m3 (prototype; Blackwell, else emulated)",
        masters=True,
        lacks={FP16: "its kernels take and return bf16"},
        alignment=32,
        gathers_fp8=True,
        tile=32,
        conv1d="gathered",
        layer_recipes=("mxfp8",),
        hardware_recipe="torchao-mxfp8",
        formats=all_in("e4m3", fsdp2="e4m3"),
    ),
}


BACKEND: Final = Backend(
    name=NAME,
    title="torchao",
    names={**_NAMES, **_ONE_FORMAT},
    recipes={
        **{recipe: recipe == "tensorwise" for recipe in get_args(Recipe)},
        "block": True,
        "int8": False,
        "mxfp8": True,
    },
    module="torchao.float8",
    notes_runs=True,
    distribution="torchao",
    layers_from=("lightning_lowprec.torchao.",),
    revert=later(".torchao.hooks:revert"),
    reconfigure=later(".torchao.hooks:reconfigure"),
    cuts=later(".torchao.hooks:cuts"),
    set_phase=later(".torchao.hooks:set_phase"),
    numerics=later(".torchao.hooks:numerics_of"),
    weight_roundings=later(".torchao.hooks:weight_roundings"),
)
