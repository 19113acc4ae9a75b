"""The table of names for ``precision=``, without Lightning's own names.

The rows have two sources: half precision, which converts no layers, and the registry of backends, whose formats have
endings (:mod:`~lightning_lowprec.conversion.name_formats`). A word means the same computation on every machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import PrecisionName
from lightning_lowprec.conversion.name_formats import (
    EVERYWHERE,
    FP16,
    GROUPED_ROUND_TO_BF16,
    HALF,
    OPTIONS,
    STATE,
    Formats,
    suffix_refusal,
)
from lightning_lowprec.gone import PRECISIONS as GONE
from lightning_lowprec.gone import gone
from lightning_lowprec.msamp.backend import BACKEND as MSAMP_BACKEND
from lightning_lowprec.other_stacks import PRECISIONS, RECIPES, pointer
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.te.backend import BACKEND as TE_BACKEND
from lightning_lowprec.torchao.backend import BACKEND as TORCHAO_BACKEND

if TYPE_CHECKING:
    from lightning_lowprec.precision.base import LowPrecision

_HALF_ROWS: Final[dict[str, tuple[object, str]]] = {
    "half-auto": (False, "bf16 autocast where the device has bf16, else fp16 with loss scaling"),
    "bf16-master": (True, "bf16 weights and compute, float32 masters in the optimizer"),
    "fp16-master": (True, "fp16 weights and compute, loss scaling, float32 masters in the optimizer"),
    "bf16-remainder": ("remainder", "bf16-master with the exact float32 masters kept in 2 more bytes instead of 4"),
    "bf16-8bit": ("8bit", "bf16-remainder with moments of 8 bits: 8 bytes per parameter with its gradient"),
    "bf16-sr": ("stochastic", "bf16 weights and compute, no masters: updates are rounded stochastically"),
}
"""Names that convert no layers: `master_weights` of the plugin, whose `dtype` begins the name, and a summary."""
_HALF: Final = {
    name: PrecisionName(
        plugin_class=".precision.half:HalfMixed",
        options={"dtype": name[:4], "master_weights": masters} if masters else {"dtype": "auto"},
        hardware_recipe=cast(RecipeKey, name[:4] if masters else name),
        summary=summary,
        formats=HALF[name],
    )
    for name, (masters, summary) in _HALF_ROWS.items()
}
OF_LIGHTNING: Final = (
    *("transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"),
    *("32-true", "64-true", 64, 32, 16, "64", "32", "16", "bf16"),
)
"""Lightning's own names, so that the command need not import Lightning for them; a test compares them."""
TABLE: dict[str, PrecisionName] = {}
"""Every name, in the order of the docs."""


def create(name: str) -> "LowPrecision":
    """Return a new plugin for a name of the table; raise ImportError if a package that it needs does not import."""
    row = TABLE[name]
    plugin: LowPrecision = row.plugin(**row.options)
    plugin.precision = name
    return plugin


def validate_name(name: object) -> None:
    """Raise a ValueError for an unknown name; the message says what to write instead, and has every name."""
    if name not in (*TABLE, *OF_LIGHTNING):
        raise unknown_name(name)


def unknown_name(name: object, also_allowed: Sequence[object] = OF_LIGHTNING) -> ValueError:
    """Return the error for an unknown name: what to write instead, with at most three names."""
    if hasattr(name, "convert_module"):
        plugin = f"{getattr(name, '__name__', type(name).__name__)}(...)"
        return ValueError(f"`precision={plugin}` is a plugin, expected a name. Write `plugins={plugin}`.")
    recipe = _nemo_recipe(name) if "_" in str(name) or "-with-" in str(name) else None
    hint = f"NeMo's recipe is a plugin: write {recipe}." if recipe else gone(str(name), GONE)
    if recipe and (dashed := str(name).replace("_", "-")) in (*also_allowed, *TABLE):
        hint = f"Did you mean {dashed!r}? {hint}"
    hint = hint or suffix_refusal(str(name), TABLE) or pointer(name, {**PRECISIONS, **RECIPES}, [*also_allowed, *TABLE])
    hint = hint or "Try 'bf16-mixed', 'fp8-hybrid' or 'bf16-8bit'."
    return ValueError(f"Precision {name!r} is invalid. {hint} `lowprec doctor` lists the names of this package.")


def no_plugin(word: str) -> ValueError:
    """Return the error for a string in ``plugins=``: a precision goes to ``precision=``."""
    if word in (*TABLE, *OF_LIGHTNING):
        remedy = f"Write `precision={word!r}`"
        remedy += "." if (recipe := _nemo_recipe(word)) is None else f"; NeMo's precision of this name is {recipe}."
    else:
        remedy = str(unknown_name(word))
    return ValueError(f"`plugins={word!r}` is a string, expected a plugin. {remedy}")


def _nemo_recipe(name: object) -> str | None:
    from lightning_lowprec import recipes

    function = "fp16_mixed" if name == "16-mixed" else str(name).replace("-", "_")
    return f"`plugins=lightning_lowprec.recipes.{function}()`" if function in recipes.NAMES else None


def _with_suffix(row: PrecisionName, suffix: str, backend: str) -> PrecisionName:
    options = {**row.options, **OPTIONS.get(suffix, {})}
    plan = replace(row.plan, experts=GROUPED_ROUND_TO_BF16) if (suffix, row.plan.experts) == (FP16, None) else row.plan
    summary, formats = f"{row.summary}{EVERYWHERE[suffix]}", _formats(row, suffix)
    return replace(row, options=options, summary=summary, plan=plan, formats=formats, backend=backend)


def _formats(row: PrecisionName, suffix: str) -> Formats | None:
    """Return the formats of a name with a suffix: fp16 is sent where bf16 was; masters change the state."""
    if row.formats is None or not suffix:
        return row.formats
    if suffix == FP16:
        return replace(row.formats, fsdp2="fp16") if row.formats.fsdp2 == "bf16" else row.formats
    return replace(row.formats, **{name: getattr(HALF[f"bf16{suffix}"], name) for name in STATE})


def _fill_table() -> None:
    TABLE.clear()
    TABLE.update(_HALF)
    for backend in backends.registered():
        for name, row in backend.names.items():
            for suffix in EVERYWHERE:  # those that its backend says it has
                if not suffix or (row.fp16 if suffix == FP16 else row.masters):
                    TABLE[f"{name}{suffix}"] = _with_suffix(row, suffix, backend.name)


backends.on_change(_fill_table)
for _backend in (TORCHAO_BACKEND, TE_BACKEND, MSAMP_BACKEND):
    backends.register(_backend)
