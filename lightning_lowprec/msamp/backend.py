"""The entry of the MS-AMP backend in the registry: everything that the rest of the package knows about it."""

from dataclasses import replace
from typing import Final

from lightning_lowprec.conversion.backends import Backend, PlanRequest, PrecisionName, later
from lightning_lowprec.conversion.name_formats import HYBRID, Formats

NAME: Final = "msamp"


def _name(level: str, summary: str, formats: Formats) -> PrecisionName:
    return PrecisionName(
        plugin_class=".msamp.plugin:MSAMP",
        options={"level": level},
        summary=summary,
        gathers_fp8=level == "O3",
        formats=formats,
        plan=PlanRequest(pads=True),
        weight_rounding=later(".msamp.linear:rounding"),
        hardware_recipe="msamp",
    )


_O1: Final = replace(HYBRID, weight="fp16", gradient="e4m3", ddp="e4m3", fsdp2="-")
_O2: Final = replace(_O1, moments="e4m3, fp16")
_O3: Final = replace(_O2, weight="e4m3", master="fp16", fsdp2="e4m3")
_NAMES: Final = {
    "msamp-o1": _name("O1", "FP8 linear layers with fp16 weights and FP8 gradients, float32 moments", _O1),
    "msamp-o2": _name("O2", "FP8 linear layers with fp16 weights, FP8 gradients, e4m3 and fp16 moments", _O2),
    "msamp-o3": _name("O3", "as msamp-o2, and e4m3 codes of the weights are kept, which FSDP2 gathers", _O3),
}


BACKEND: Final = Backend(
    name=NAME,
    title="MS-AMP",
    names=_NAMES,
    notes_runs=True,
    layers_from=("lightning_lowprec.msamp.",),
    revert=later(".msamp.linear:revert"),
    revert_optimizer=later(".msamp.plugin:revert_optimizer"),
    changed_optimizers=later(".msamp.plugin:scaled_optimizers"),
    coded_weight=later(".msamp.weight:coded_weight"),
    keeps_master=later(".msamp.weight_state:msamp_state_of"),
    shard_codes=later(".msamp.fsdp2:shard_codes"),
    numerics=later(".msamp.linear:numerics_of"),
    weight_roundings=later(".msamp.linear:weight_roundings"),
)
