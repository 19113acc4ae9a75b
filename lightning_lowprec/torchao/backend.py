"""The entry of the torchao backend in the registry: everything that the rest of the package knows about it."""

from dataclasses import replace
from functools import partial
from typing import Final, Literal, get_args

from lightning_lowprec.conversion.backends import Backend, PlanRequest, PrecisionName, later
from lightning_lowprec.conversion.name_formats import E4M3_TENSORWISE, FP16, HYBRID, NO_GROUPED_PRODUCT, Formats, all_in
from lightning_lowprec.products.formats import FORMATS

NAME: Final = "torchao"
FP8Format = Literal["hybrid", "e4m3"]
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "block", "mxfp8"]


def _name(recipe: str, formats: Formats, summary: str, lacks: str | None = None, **options: str) -> PrecisionName:
    """Return the row of a name; ``lacks``: why or where the base dtype is no fp16, if no ending says so."""
    spec = FORMATS[recipe]
    is_int8, lacks = recipe == "int8", lacks or spec.not_fp16
    return PrecisionName(
        plugin_class=f".torchao.{'int8:Int8TorchAO' if is_int8 else 'fp8:FP8TorchAO'}",
        options={"recipe": recipe, **options},
        plan=PlanRequest(
            recipe=recipe if spec.arithmetic is None else "tensorwise",
            alignment=spec.features,
            format=spec.title,
            frozen_codes=spec.stores_codes,
            pads=False if "pad_inner_dim" in spec.options else None,
            experts=None if spec.experts else NO_GROUPED_PRODUCT,
        ),
        summary=summary,
        fp16=lacks is None,
        masters=True,
        lacks={} if lacks is None else {FP16: lacks},
        gathers_fp8=spec.one_code,
        tile=spec.tile,
        layer_recipes=(recipe,) if is_int8 else get_args(Recipe),
        weight_rounding=partial(later(".torchao.linear:rounding_of"), spec.scale_per, spec.scale_per == "row"),
        hardware_recipe=spec.hardware,
        formats=formats,
    )


_E4M3: Final = all_in("e4m3")
_GATHERED: Final = all_in("e4m3", fsdp2="e4m3")
_GW_HP: Final = replace(_E4M3, grad_weight="bf16")
_NAMES: Final = (
    _name("tensorwise", HYBRID, "FP8 linear layers by torchao, one scale per tensor, gradients in e5m2"),
    _name("rowwise", _E4M3, "torchao's rowwise recipe: one scale per row, e4m3 everywhere"),
    _name("rowwise_with_gw_hp", _GW_HP, "rowwise with the weight gradient in high precision, the most accurate"),
    _name("block", _GATHERED, "torchao, a scale per 128 values or 128x128 weights, e4m3, as DeepSeek-V3"),
    _name(
        "int8",
        all_in("int8"),
        "torchao's int8 linear layers, a scale per row (prototype; Ampere, Ada, Hopper)",
        "write `plugins=Int8TorchAO(base='fp16')`",
    ),
    _name(
        "mxfp8", _GATHERED, "torchao, a power-of-two scale per 32 values, e4m3 (prototype; Blackwell, else emulated)"
    ),
)
_OF_RECIPE: Final = {FORMATS[row.options["recipe"]].precision: row for row in _NAMES}
_IN_E4M3: Final = {
    "fp8-e4m3": _name(
        "tensorwise",
        E4M3_TENSORWISE,
        "FP8 linear layers by torchao, one scale per tensor, e4m3 everywhere",
        "write `plugins=FP8TorchAO(fp8_format='e4m3', base='fp16')`",
        fp8_format="e4m3",
    )
}


BACKEND: Final = Backend(
    name=NAME,
    title="torchao",
    names={"fp8-hybrid": _OF_RECIPE["fp8-hybrid"], **_IN_E4M3, **_OF_RECIPE},
    recipes={recipe: spec.one_code for recipe, spec in FORMATS.items()},
    module="torchao.float8",
    notes_runs=True,
    distribution="torchao",
    layers_from=("lightning_lowprec.torchao.",),
    revert=later(".torchao.linear:revert"),
    cuts=later(".torchao.linear:cuts"),
    numerics=later(".torchao.linear:numerics_of"),
    weight_roundings=later(".torchao.linear:weight_roundings"),
)
