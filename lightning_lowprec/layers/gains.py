"""What FP8 gains over bf16 for one Linear, forward and backward, by shape.

The figures are published ones of torchao on one H100 (compiled, bf16 = 1): its README's table and the break-even
thresholds of its automatic filter. They stand in until figures measured by this project's own benchmark are committed;
other devices differ.
"""

from __future__ import annotations

import math
from typing import Literal

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SOURCE = "torchao's published H100 figures"
DEFAULT_TOKENS = 16384
"""Tokens per step and device that the published figures are for."""

PUBLISHED: dict[tuple[int, int, int], float] = {  # (tokens, in_features, out_features) -> tensorwise gain
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
    """The published gain of the nearest shape (in log space); None below break-even, where only that is published.

    A coarse figure: it orders layers and tells gain from loss, and is no forecast of a step's time.
    """
    if below_break_even(recipe, in_features, out_features):
        return None

    def distance(shape: tuple[int, int, int]) -> float:
        return sum(
            math.log2(a / b) ** 2
            for a, b in zip(shape, (tokens, max(in_features, 1), max(out_features, 1)), strict=True)
        )

    return PUBLISHED[min(PUBLISHED, key=distance)]
