"""Say which phases of a schedule Transformer Engine can compute.

Transformer Engine has three forms of a layer:

    none in bf16                      the recipe
    grad_input and grad_weight        the recipe with `backward_override="high_precision"`
    all                               torch's Linear under autocast, bit for bit that of `bf16-mixed`

It has no layer with a forward in bf16 and a backward in FP8. Delayed scaling has no backward in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from lightning_lowprec.conversion.gemms import ALL_GEMMS, NO_GEMM, InBF16, words
from lightning_lowprec.precision.schedule import Schedule

BACKWARD: Final[InBF16] = frozenset({"grad_input", "grad_weight"})


def refusal(gemms: InBF16, recipe: Any) -> str | None:
    """Return why Transformer Engine cannot compute these products in high precision, and the remedy; None if it can."""
    if gemms in (NO_GEMM, ALL_GEMMS):
        return None
    if gemms != BACKWARD:
        return (
            f"Transformer Engine has no layer with {words(gemms)} and the rest in FP8. Use 'bf16' (all GEMMs),"
            " {'grad_input': 'bf16', 'grad_weight': 'bf16'}, or FP8TorchAO"
        )
    if recipe.delayed():
        return "delayed scaling has no backward GEMMs in high precision. Use `recipe='current'`, or 'bf16' (all GEMMs)"
    return None


def check_phases(schedule: Schedule, recipes: Iterable[Any], *, fuse: object) -> None:
    """Raise if a phase cannot be computed with one of the recipes, or with fused layers.

    Raises:
        ValueError: see :func:`refusal`; or layers are fused, and fused layers cannot become torch's.
    """
    switches = any(phase.in_bf16 or phase.keep for phase in schedule.phases)
    if switches and fuse:
        raise ValueError(
            f"`schedule` is not valid with `fuse={fuse!r}`: a fused layer cannot switch to bf16. Leave one of them out."
        )
    for number, phase in enumerate(schedule.phases):
        for recipe in recipes:
            if (reason := refusal(phase.in_bf16, recipe)) is not None:
                raise ValueError(f"`schedule[{number}]['gemms']` is not possible: {reason}.")
            if recipe.backward_override is not None:
                schedule.check_fp8(BACKWARD, f"backward_override={recipe.backward_override!r}")
