"""What FP8 gains over bf16 for one Linear, forward and backward, by shape.

The figures are those of ``measured_gains``, which ``python -m benchmarks.measured_gains`` writes from a run of the GPU
lane. While that table is empty, published ones of torchao on one H100 stand in (compiled, bf16 = 1): its README's table
and the break-even thresholds of its automatic filter. Other devices differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from lightning_lowprec.conversion import measured_gains

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Shape = tuple[int, int, int]
"""(tokens, in_features, out_features)"""
SOURCE = measured_gains.SOURCE or "torchao's published H100 figures"
"""Where the figures come from, for people to read."""
DEFAULT_TOKENS = 16384
"""Tokens per step and device that are assumed unless somebody says otherwise: those of the published figures."""

PUBLISHED: dict[Shape, float] = {  # tensorwise
    (16384, 1024, 8192): 1.43,
    (16384, 8192, 7168): 1.73,
    (16384, 3584, 8192): 1.71,
    (1024, 2048, 1024): 0.80,
}


def below_break_even(recipe: Recipe, in_features: int, out_features: int) -> bool:
    """Whether FP8 is slower than bf16 at this shape, by the published thresholds."""
    k, n = in_features, out_features
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


def expected_gain(recipe: Recipe, in_features: int, out_features: int, tokens: int = DEFAULT_TOKENS) -> float | None:
    """The gain of the nearest shape (in log space); None where FP8 is slower than bf16.

    Measured, if this recipe was: a shape smaller than all measured ones is slower where the published thresholds say
    so. Else the published gain, which is tensorwise's, above these thresholds. A coarse figure: it orders layers and
    tells gain from loss, and is no forecast of a step's time.
    """
    measured = measured_gains.GAINS.get(recipe)
    wanted = (tokens, in_features, out_features)
    if measured is None:
        return None if below_break_even(recipe, in_features, out_features) else PUBLISHED[_nearest(wanted, PUBLISHED)]
    smallest = in_features < min(k for _, k, _ in measured) or out_features < min(n for _, _, n in measured)
    if smallest and below_break_even(recipe, in_features, out_features):
        return None
    gain = measured[_nearest(wanted, measured)]
    return gain if gain >= 1.0 else None


def _nearest(wanted: Shape, shapes: Iterable[Shape]) -> Shape:
    """The shape whose three numbers differ from ``wanted`` by the smallest factors; the first of equals."""

    def distance(shape: Shape) -> float:
        return sum(math.log2(a / max(b, 1)) ** 2 for a, b in zip(shape, wanted, strict=True))

    return min(shapes, key=distance)
