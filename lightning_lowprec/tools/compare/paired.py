"""Judge a precision over several seeds: each run has a partner, the baseline's run with the same seed.

Runs of one seed begin with the same weights and read the same batches. The differences within the pairs are therefore
smaller than those between seeds, and an interval over the pairs tells smaller differences apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lightning_lowprec.tools.compare.interval import Interval
from lightning_lowprec.tools.compare.result import PrecisionResult, Verdict, judge
from lightning_lowprec.tools.compare.steps import NoStepsError, more_steps


@final
@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one precision against the baseline, over seeds.

    Args:
        gaps: for each seed, the relative difference of the final metric from the baseline's.
        gap: the mean of ``gaps``, with its confidence interval.
        more_steps: the share of steps that the precision needs beyond the baseline's; None: not measured.
        no_steps: why ``more_steps`` is not measured.
    """

    gaps: list[float]
    gap: Interval
    more_steps: Interval | None = None
    no_steps: str | None = None


def judge_seeds(
    runs: Sequence[PrecisionResult], baseline: Sequence[PrecisionResult], max_loss_gap: float
) -> tuple[Verdict, Cost | None]:
    """Judge a precision over seeds, and return its cost; None if a run failed, or for the baseline.

    A precision passes if its whole interval is within ``max_loss_gap``.

    Args:
        runs: the runs of the precision, one per seed, at least two.
        baseline: the runs of the baseline, with the same seeds in the same order.
        max_loss_gap: the largest relative difference.
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
