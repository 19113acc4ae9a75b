"""Recommend three precisions for a machine: why, and the command that compares them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One precision to try.

    Args:
        name: the precision.
        why: one line.
    """

    name: str
    why: str


_BASELINE: Final = "float32 weights, half-precision compute: the baseline of the comparison"
_REMAINDER: Final = "half the bytes of the weights, float32 masters: 14 bytes per parameter with AdamW, not 16"
_CANDIDATES: Final[Sequence[tuple[str, str]]] = (
    ("mxfp8", "FP8 GEMMs with a scale per 32 values, which this GPU has in hardware"),
    ("fp8-hybrid", "FP8 GEMMs with one scale per tensor: pays on large linear layers"),
    ("fp8-hybrid-remainder", f"the same with bf16 weights: {_REMAINDER}"),
    (
        "fp8-rowwise-gw-hp",
        "FP8 GEMMs with one scale per row, weight gradients in bf16: less rounding than one scale per tensor",
    ),
    ("int8-mixed", "int8 GEMMs, which this GPU runs faster than bf16: pays on large linear layers"),
    ("bf16-remainder", _REMAINDER),
    ("bf16-sr", "no masters, updates are rounded stochastically: 12 bytes per parameter with AdamW, not 16"),
)
_WITHOUT_BF16: Final = (
    ("fp16-master", "fp16 weights and gradients with loss scaling, float32 masters in the optimizer"),
    ("32-true", "Lightning's float32: the reference for accuracy"),
)
_EMULATED: Final = (
    ("bf16-remainder", _REMAINDER),
    ("fp8-hybrid", "emulated here, slow: shows the numerics of FP8 before you rent a GPU"),
)


def recommend(runs: Collection[str], emulated: Collection[str], *, bf16: bool) -> list[Recommended]:
    """Return three precisions, the baseline first.

    Args:
        runs: the names that run on this machine, emulated or not.
        emulated: the names among them that are emulated.
        bf16: whether the device has bf16.
    """
    others: Sequence[tuple[str, str]]
    if not bf16:
        others = _WITHOUT_BF16
    elif "fp8-hybrid" in emulated:
        others = _EMULATED
    else:
        others = tuple((name, why) for name, why in _CANDIDATES if name in runs and name not in emulated)[:2]
    return [Recommended(name=name, why=why) for name, why in (("half-auto", _BASELINE), *others)]


def commands(recommended: Sequence[Recommended]) -> list[str]:
    """Return the command that compares the precisions, and the command that trains with the last of them."""
    names = ",".join(row.name for row in recommended)
    return [
        f"lowprec compare --precisions {names} --model my.Model --data my.Data",
        f"lowprec run --precision={recommended[1].name} train.py",
    ]
