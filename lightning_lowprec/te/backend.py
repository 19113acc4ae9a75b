"""The entry of the Transformer Engine backend in the registry: all that the rest of the package knows about it."""

from dataclasses import replace
from functools import partial
from typing import Final, cast

from lightning_lowprec.conversion import name_formats
from lightning_lowprec.conversion.backends import Backend, PlanRequest, PrecisionName, imported, later
from lightning_lowprec.gone import ENDINGS
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.te.recipes import ALIGNMENT, MODULE

NAME: Final = "transformer_engine"
_HYBRID: Final = replace(name_formats.HYBRID, fsdp2="bf16")
_E4M3: Final = replace(name_formats.E4M3_TENSORWISE, fsdp2="bf16")
_BLOCKS, _FP4 = name_formats.all_in("e4m3"), name_formats.all_in("e2m1", samples=name_formats.ONE_SCALE)
_ROWS: Final = (
    ("fp8-hybrid-te", "delayed", "hybrid", "scales from the amax of past steps, gradients in e5m2", _HYBRID),
    ("fp8-e4m3-te", "delayed", "e4m3", "scales from the amax of past steps, e4m3 everywhere", _E4M3),
    ("fp8-current-te", "current", "hybrid", "scales from each tensor, gradients in e5m2", _HYBRID),
    ("fp8-block-te", "block", "e4m3", "a scale per 128 values or 128x128 weights, e4m3", _BLOCKS),
    ("mxfp8-te", "mxfp8", "e4m3", "a power-of-two scale per 32 values, e4m3 (Blackwell)", _BLOCKS),
    ("nvfp4-te", "nvfp4", "e4m3", "4 bits with a scale per 16 values (Blackwell)", _FP4),
)
"""Names for ``precision=``, the kind of recipe, the format of FP8, a summary, and the formats of the tables."""
NAMES: Final = {(kind, fp8_format): name for name, kind, fp8_format, *_ in _ROWS}
"""The name for ``precision=`` of each kind of recipe and format."""
WITH_MASTERS: Final = frozenset(NAMES.values()) - {"mxfp8-te", "nvfp4-te"}
"""The names that exist with the suffixes of bf16 weights too."""
_NOT_COUNTED: Final = "it needs Blackwell, where bf16 weights have not been counted yet; to use them, write"


def _lacks(kind: str) -> dict[str, str]:
    """Return the reason or remedy for every suffix that only some names have."""
    options = {suffix: f"master_weights={name_formats.OPTIONS[suffix]['master_weights']!r}" for suffix in ENDINGS}
    masters = {suffix: f"{_NOT_COUNTED} `plugins=FP8TE({kind!r}, {option})`" for suffix, option in options.items()}
    no_fp16 = kind == "nvfp4" and "its Hadamard transform is made for bf16"
    return {name_formats.FP16: no_fp16 or f"write `plugins=FP8TE({kind!r}, base='fp16')`", **masters}


BACKEND: Final = Backend(
    name=NAME,
    title="Transformer Engine",
    names={
        name: PrecisionName(
            plugin_class=".te.plugin:FP8TE",
            options={"recipe": kind, "fp8_format": fp8_format},
            summary=f"Transformer Engine, {summary}",
            fp16=name == "fp8-hybrid-te",
            masters=name in WITH_MASTERS,
            lacks=_lacks(kind),
            plan=PlanRequest(
                alignment=ALIGNMENT.get(kind, 16), experts=name_formats.EXPERTS_NEED_TORCHAO, conv1d=False
            ),
            weight_rounding=partial(later(".te.recipes:rounding_of"), kind),
            hardware_recipe=cast(RecipeKey, f"te-{kind}"),
            formats=formats,
        )
        for name, kind, fp8_format, summary, formats in _ROWS
    },
    module=MODULE,
    notes_runs=True,
    distribution="transformer-engine",
    numerics=later(".te.layer:numerics_of"),
    weight_roundings=later(".te.layer:weight_roundings"),
    layers_from=("transformer_engine.", "lightning_lowprec.te."),
    revert=later(".te.plugin:revert"),
    cuts=lambda layer: False,
    checkpoint=lambda: imported(f"{MODULE}:checkpoint"),  # restores the scales of layers before it recomputes them
)
