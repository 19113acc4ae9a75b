"""The mean of paired differences, with a confidence interval from Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

CONFIDENCE = 0.95
"""The share of experiments whose interval holds the true mean, if the differences are normal and independent."""
_HALVINGS = 60  # of the interval (0, pi / 2), which then has the width of one float64


@final
@dataclass(frozen=True, kw_only=True)
class Interval:
    """The values between ``mean - half_width`` and ``mean + half_width``."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """Return the 95 % confidence interval of the mean of at least two independent differences."""
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return cls(mean=statistics.fmean(differences), half_width=student_t(len(differences) - 1) * error)

    @property
    def holds_zero(self) -> bool:
        """Whether the differences may be 0 on average."""
        return abs(self.mean) <= self.half_width

    def is_within(self, bound: float) -> bool:
        """Return whether every value of the interval is between ``-bound`` and ``bound``."""
        return abs(self.mean) + self.half_width <= bound

    def percent(self, digits: int = 2, *, sign: bool = True) -> str:
        """Return the interval in percent: ``+0.20% ± 0.10%``; without ``sign`` the absolute mean."""
        mean = f"{self.mean:+.{digits}%}" if sign else f"{abs(self.mean):.{digits}%}"
        return f"{mean} ± {self.half_width:.{digits}%}"


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t with ``P(|T| <= t) = confidence`` for Student's T with ``degrees`` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _probability(degrees, middle) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _probability(degrees: int, angle: float) -> float:
    """Return ``P(|T| <= sqrt(degrees) * tan(angle))``: Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    sin, cos = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cos if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(odd + 2, degrees - 1, 2):
        term *= cos * cos * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sin * total) if odd else sin * total
