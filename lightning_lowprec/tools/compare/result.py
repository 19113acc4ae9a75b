"""The figures of one training, and the verdict on a precision beside the baseline: of one run, or over several seeds.

Over several seeds each run has a partner, the baseline's run with the same seed: the differences within the pairs are
smaller than those between seeds, and an interval over the pairs (Student's t) tells smaller differences apart.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

WARMUP_STEPS = 5
"""First steps that the median step time leaves out: they allocate, compile and fill caches."""
CONFIDENCE = 0.95
"""The share of experiments whose interval holds the true mean, if the differences are normal and independent."""
_STEPS = 2**60  # in the interval from 0 to pi / 2: the width of one is below that of a float64


@dataclass(kw_only=True)
class PrecisionResult:
    """The raw figures of one training, up to the failure if ``error`` is set."""

    name: str
    seed: int = 0
    train_losses: list[float] = field(default_factory=list)
    """One per training batch."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each training batch from its start until its loss is read, optimizer step included."""
    val_steps: list[int] = field(default_factory=list)
    """Training batches before each validation."""
    val_losses: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Most bytes that torch allocated on the GPU; None on a CPU."""
    device: str = ""
    on_cpu: bool = False
    notes: list[str] = field(default_factory=list)
    """Messages that the precision logged, e.g. how many layers it converted."""
    error: str | None = None

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the figures of one message of the training."""
        if "loss" in message:
            self.train_losses.append(message["loss"])
            self.step_seconds.append(message["seconds"])
        elif "val" in message:
            self.val_steps.append(len(self.train_losses))
            self.val_losses.append(message["val"])
        else:
            vars(self).update(message)

    @property
    def final_val(self) -> float | None:
        """The validation metric after the last step."""
        return self.val_losses[-1] if self.val_losses and self.error is None else None

    @property
    def final_train(self) -> float | None:
        """The mean training loss of the last tenth of the steps."""
        tail = self.train_losses[-max(1, len(self.train_losses) // 10) :]
        return statistics.fmean(tail) if tail else None

    @property
    def step_time(self) -> float | None:
        """The median time of a step in seconds, without the warm-up."""
        warmup = min(WARMUP_STEPS, len(self.step_seconds) // 2)
        return statistics.median(self.step_seconds[warmup:]) if self.step_seconds else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one precision; ``gap`` is the relative difference of its final metric from the baseline's."""

    ok: bool
    text: str
    gap: float | None = None
    cost: Cost | None = None
    """Over several seeds, unless a run failed, and not of the baseline."""


def judge(result: PrecisionResult, baseline: PrecisionResult, max_loss_gap: float) -> Verdict:
    """Judge a precision: it must train, and end with a finite metric within ``max_loss_gap`` of the baseline's."""
    if result.error is not None:
        return Verdict(ok=False, text="failed: " + result.error.strip().rpartition("\n")[2])
    value, reference = result.final_val, baseline.final_val
    if value is None:
        return Verdict(ok=False, text="no validation ran: expected training batches, validation_step, val_dataloader")
    if not math.isfinite(value):
        return Verdict(ok=False, text=f"final validation metric is {value}")
    if result is baseline:
        return Verdict(ok=True, text="baseline", gap=0.0)
    if reference is None or not math.isfinite(reference):
        return Verdict(ok=False, text=f"not judged: the baseline {baseline.name} has no finite result")
    gap = relative_gap(value, reference)
    if abs(gap) <= max_loss_gap:
        return Verdict(ok=True, text=f"within {100 * max_loss_gap:g}%", gap=gap)
    return Verdict(ok=False, text=f"off by more than {100 * max_loss_gap:g}%", gap=gap)


def relative_gap(value: float, reference: float) -> float:
    """Return the relative difference from ``reference``; a reference of 0 must be met almost exactly."""
    return (value - reference) / (abs(reference) or 1e-12)


# ---- over several seeds


@final
@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one precision against the baseline, over seeds."""

    gaps: list[float]
    """For each seed, the relative difference of the final metric from the baseline's."""
    gap: Interval


def judge_seeds(runs: Sequence[PrecisionResult], baseline: Sequence[PrecisionResult], max_loss_gap: float) -> Verdict:
    """Judge a precision over seeds: its whole interval must be within ``max_loss_gap``."""
    gaps = []
    for run, partner in zip(runs, baseline, strict=True):
        verdict = judge(run, partner, max_loss_gap)
        if verdict.gap is None:
            return Verdict(ok=False, text=f"seed {run.seed}: {verdict.text}")
        gaps.append(verdict.gap)
    if len({partner.final_val for partner in baseline}) == 1:
        text = "not judged: the baseline ends alike with every seed, so neither weights nor batches depend on the seed"
        return Verdict(ok=False, text=text)
    if runs[0] is baseline[0]:
        return Verdict(ok=True, text="baseline", gap=0.0)
    cost = Cost(gaps=gaps, gap=Interval.of(gaps))
    ok = cost.gap.is_within(max_loss_gap)
    return Verdict(ok=ok, text=_words(cost, max_loss_gap), gap=cost.gap.mean, cost=cost)


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

    def percent(self, *, sign: bool = True) -> str:
        """Return the interval in percent: ``+0.20% ± 0.10%``; without ``sign`` the absolute mean."""
        mean = f"{self.mean:+.2%}" if sign else f"{abs(self.mean):.2%}"
        return f"{mean} ± {self.half_width:.2%}"


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t with ``P(|T| <= t) = confidence`` for Student's T with ``degrees`` degrees of freedom."""
    step = math.pi / 2 / _STEPS
    count = bisect_left(range(_STEPS), confidence, key=lambda number: _probability(degrees, number * step))
    return math.sqrt(degrees) * math.tan(count * step)


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
