"""The precisions that train on a CPU here, and the reason for every name that is left out."""

from __future__ import annotations

import torch

from lightning_lowprec.conversion.name_formats import split
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import availability

BASELINE = "32-true"
OF_LIGHTNING = ("16-true", "bf16-true", "bf16-mixed")
"""Lightning's own names that train on a CPU: ``16-mixed`` becomes ``bf16-mixed`` there."""
FAST, PROMOTED = "fp8-hybrid@hopper", "fp8-hybrid@hopper-promoted"
"""Names that :mod:`~benchmarks.evidence.devices` adds: products summed as on this GPU, fast or promoted."""


def left_out() -> dict[str, str]:
    """Return the names of the table that do not train on this CPU, each with the reason."""
    found = {name: availability(name, torch.device("cpu")) for name in TABLE if name not in (FAST, PROMOTED)}
    return {name: how.reason.split(". ")[0] for name, how in found.items() if not how.runs}


def on_cpu() -> tuple[str, ...]:
    """Return the names to train, the baseline first."""
    own = [name for name in TABLE if name not in {*left_out(), FAST, PROMOTED}]
    return (BASELINE, *OF_LIGHTNING, *own, FAST, PROMOTED)


def without_ending(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that are no other name with an ending: ``fp8-hybrid``, but not ``fp8-hybrid-sr``."""
    return tuple(name for name in names if not (split(name)[1] and split(name)[0] in TABLE))
