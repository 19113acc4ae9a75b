"""Judge a precision over several seeds: each run has a partner, the baseline's run with the same seed.

Runs of one seed begin with the same weights and read the same batches. The differences within the pairs are therefore
smaller than those between seeds, and an interval over the pairs (Student's t) tells smaller differences apart.

The cost in optimizer steps is how many more steps reach the baseline's training loss. That loss is noisy; its smoothed
curve is the least-squares line of the loss over the logarithm of the step, through the second half of the run:

    loss = a - b ln(step)        a precision that ends d higher is where the baseline was at step S exp(-d / b),
                                 so the precision needs exp(d / b) - 1 more steps

The difference d is that of the mean loss of the last tenth of the steps. Both runs read the same batches there, so the
noise of the batches is in no difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lightning_lowprec.tools.compare.result import PrecisionResult, Verdict, judge

CONFIDENCE = 0.95
"""The share of experiments whose interval holds the true mean, if the differences are normal and independent."""
_HALVINGS = 60  # of the interval (0, pi / 2), which then has the width of one float64
FEWEST_STEPS = 20
"""Training batches that a run needs for a line."""
_STANDARD_ERRORS = 2.0  # a curve that falls by less is flat
_LONGEST = math.log(2)  # the line covers the second half of the run


@final
@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one precision against the baseline, over seeds."""

    gaps: list[float]
    """For each seed, the relative difference of the final metric from the baseline's."""
    gap: Interval
    """The mean of ``gaps``."""
    more_steps: Interval | None = None
    """The share of steps that the precision needs beyond the baseline's; None: not measured."""
    no_steps: str | None = None
    """Why ``more_steps`` is not measured."""


def judge_seeds(
    runs: Sequence[PrecisionResult], baseline: Sequence[PrecisionResult], max_loss_gap: float
) -> tuple[Verdict, Cost | None]:
    """Judge a precision over seeds, and return its cost; None if a run failed, or for the baseline.

    A precision passes if its whole interval is within ``max_loss_gap``.
    """
    gaps = []
    for run, partner in zip(runs, baseline, strict=True):
        verdict = judge(run, partner, max_loss_gap)
        if verdict.gap is None:
            return Verdict(ok=False, text=f"seed {run.seed}: {verdict.text}"), None
        gaps.append(verdict.gap)
    if len({partner.final_val for partner in baseline}) == 1:
        text = "not judged: the baseline ends alike with every seed, so neither weights nor batches depend on the seed"
        return Verdict(ok=False, text=text), None
    if runs[0] is baseline[0]:
        return Verdict(ok=True, text="baseline", gap=0.0), None
    cost = _cost(gaps, runs, baseline)
    ok = cost.gap.is_within(max_loss_gap)
    return Verdict(ok=ok, text=_words(cost, max_loss_gap), gap=cost.gap.mean), cost


def _cost(gaps: list[float], runs: Sequence[PrecisionResult], baseline: Sequence[PrecisionResult]) -> Cost:
    steps = []
    for run, partner in zip(runs, baseline, strict=True):
        try:
            steps.append(more_steps(run, partner))
        except NoStepsError as error:
            return Cost(gaps=gaps, gap=Interval.of(gaps), no_steps=f"with seed {run.seed} {error}")
    return Cost(gaps=gaps, gap=Interval.of(gaps), more_steps=Interval.of(steps))


def _words(cost: Cost, bound: float) -> str:
    gap = cost.gap
    if not any(cost.gaps):
        return "equal with every seed"
    if gap.holds_zero:
        spread = f"the spread between seeds (±{gap.half_width:.2%}) is larger than the difference ({gap.mean:+.2%})"
        more = "" if gap.is_within(bound) else f"; more seeds may tell whether it is within {100 * bound:g}%"
        return f"not told apart: {spread}{more}"
    if gap.is_within(bound):
        return f"within {100 * bound:g}%"
    return f"{'worse' if gap.mean > 0 else 'better'} by {gap.percent(sign=False)}"


# ---- the interval


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


# ---- the cost in steps


@final
class NoStepsError(ValueError):
    """The cost in steps cannot be measured; the message says why."""


def more_steps(result: PrecisionResult, baseline: PrecisionResult) -> float:
    """Return the share of steps that a precision needs beyond the baseline's: 0.008 is 0.8 % more steps."""
    ours, theirs = result.final_train, baseline.final_train
    count = len(baseline.train_losses)
    if count < FEWEST_STEPS or ours is None or theirs is None:
        raise NoStepsError(f"the runs have {count} steps, and {FEWEST_STEPS} are needed")
    slope, error = fall(baseline.train_losses)
    if slope <= _STANDARD_ERRORS * error:
        raise NoStepsError("the baseline's training loss is flat: over the second half it falls by less than its noise")
    exponent = (ours - theirs) / slope
    if abs(exponent) > _LONGEST:
        raise NoStepsError("the training losses differ by more than the baseline's loss falls in the second half")
    return math.expm1(exponent)


def fall(losses: list[float]) -> tuple[float, float]:
    """Return how fast the loss falls with the logarithm of the step in the second half, and the standard error."""
    first = len(losses) // 2
    x = [math.log(step) for step in range(first + 1, len(losses) + 1)]
    y = losses[first:]
    slope, start = statistics.linear_regression(x, y)
    residual = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = statistics.variance(x) * (len(x) - 1)
    return -slope, math.sqrt(residual / (len(x) - 2) / spread)
