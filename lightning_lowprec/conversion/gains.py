"""Estimate the gain of FP8 over bf16 for one Linear, forward and backward, from its shape.

The figures are torchao's published ones for one H100 (compiled, bf16 = 1): the table of its README and the break-even
thresholds of its automatic filter. Other devices differ.
"""

import math
from typing import Final, Literal

Published = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SOURCE: Final = "torchao's published H100 figures"
"""The origin of the figures, for log lines."""
PUBLISHED: Final = {(1024, 8192): 1.43, (8192, 7168): 1.73, (3584, 8192): 1.71}
"""(in_features, out_features), at 16,384 tokens -> how many times faster than bf16; tensorwise."""


def expected_gain(recipe: str | None, in_features: int, out_features: int) -> float | None:
    """Return the gain of the nearest published shape (in log space); None below the published break-even.

    A recipe without figures counts as tensorwise. The gain orders layers; it does not predict the time of a step.
    """
    k, n = in_features, out_features
    by_row = recipe in ("rowwise", "rowwise_with_gw_hp")
    slower = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048) if by_row else k <= 4096 and n <= 1024
    if slower:
        return None
    place = [math.log2(max(size, 1)) for size in (k, n)]
    return PUBLISHED[min(PUBLISHED, key=lambda shape: math.dist([math.log2(size) for size in shape], place))]
