"""Estimate the gain of FP8 over bf16 for one Linear, forward and backward, from its shape.

The figures come from ``measured_gains``, which ``python -m benchmarks.measured_gains`` writes after a run of the GPU
lane. While ``measured_gains`` is empty, torchao's published figures for one H100 are used (compiled, bf16 = 1): the
table of its README and the break-even thresholds of its automatic filter. Other devices differ.
"""

import math
from collections.abc import Iterable
from typing import Final, Literal, get_args

from lightning_lowprec.conversion import measured_gains

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Shape = tuple[int, int, int]
"""(tokens, in_features, out_features)"""
SOURCE = measured_gains.SOURCE or "torchao's published H100 figures"
"""The origin of the figures, for log lines."""
TOKENS: Final = 16384
"""Tokens per step and device, as in the published figures."""

PUBLISHED: dict[Shape, float] = {  # tensorwise
    (16384, 1024, 8192): 1.43,
    (16384, 8192, 7168): 1.73,
    (16384, 3584, 8192): 1.71,
    (1024, 2048, 1024): 0.80,
}


def below_break_even(recipe: str, in_features: int, out_features: int) -> bool:
    """Return whether FP8 is slower than bf16 at this shape, according to the published thresholds."""
    k, n = in_features, out_features
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


def expected_gain(recipe: str | None, in_features: int, out_features: int) -> float | None:
    """Return the gain of the nearest shape (in log space); None if FP8 is slower than bf16.

    A recipe without figures counts as tensorwise. If the recipe was not measured, the gain is a published tensorwise
    one; then, and for a shape smaller than all measured ones, the published thresholds decide whether FP8 is slower.
    The gain is a coarse figure: it orders layers, and it does not predict the time of a step.
    """
    name = recipe if recipe is not None and recipe in get_args(Recipe) else "tensorwise"
    measured = measured_gains.GAINS.get(name)
    wanted = (TOKENS, in_features, out_features)
    if measured is None:
        return None if below_break_even(name, in_features, out_features) else PUBLISHED[_nearest(wanted, PUBLISHED)]
    smallest = in_features < min(k for _, k, _ in measured) or out_features < min(n for _, _, n in measured)
    if smallest and below_break_even(name, in_features, out_features):
        return None
    gain = measured[_nearest(wanted, measured)]
    return gain if gain >= 1.0 else None


def _nearest(wanted: Shape, shapes: Iterable[Shape]) -> Shape:
    """Return the shape whose numbers differ from ``wanted`` by the smallest factors; the first if several are equal."""
    place = [math.log2(max(size, 1)) for size in wanted]
    return min(shapes, key=lambda shape: math.dist([math.log2(size) for size in shape], place))
