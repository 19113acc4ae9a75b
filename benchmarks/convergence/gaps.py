"""The differences from float32: per seed, on average with an interval, and with all comparisons in mind.

A run is compared with the run of the baseline that has the same seed: the same initial weights and the same batches.
Of many 95 % intervals one in twenty leaves out zero by chance. Holm's procedure (Scandinavian Journal of Statistics 6,
1979) says which differences remain if the chance of even one false claim among all comparisons is to be at most 5 %.
All intervals have the same degrees of freedom, so the order of the p-values is that of Student's t.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.precisions import BASELINE
from lightning_lowprec.tools.compare.result import CONFIDENCE, Interval, relative_gap, student_t


@dataclass(frozen=True, kw_only=True)
class Row:
    """One precision of one subject, over the seeds.

    ``gaps`` is empty for the baseline, and where a run failed. ``twin`` is a name before this one whose losses are the
    same bit for bit, in every step of every seed.
    """

    precision: str
    losses: tuple[float, ...]
    accuracies: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    error: str | None = None
    twin: str | None = None

    @property
    def gap(self) -> Interval | None:
        """The mean of the gaps with its interval; None with fewer than two."""
        return Interval.of(self.gaps) if len(self.gaps) > 1 else None

    @property
    def t(self) -> float:
        """The distance of the mean gap from zero, in standard errors; 0 if all gaps are zero."""
        gap = self.gap
        if gap is None or gap.mean == 0:
            return 0.0
        error = gap.half_width / student_t(len(self.gaps) - 1)
        return abs(gap.mean) / error if error else math.inf

    @property
    def spread(self) -> float | None:
        """The standard deviation of the losses over the seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None


def rows(runs: Sequence[Mapping[str, Any]], subject: str) -> list[Row]:
    """Return the rows of a subject, the baseline first, in the order in which the runs were asked for."""
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        if run["subject"] == subject:
            by_name[run["precision"]].append(run)
    partners = {run["seed"]: run["val_loss"] for run in by_name[BASELINE]}
    found, digests = [], {}
    for name, of_name in by_name.items():
        error = next((run["error"] or _not_finite(run) for run in of_name if _failed(run)), None)
        gaps = [] if error or name == BASELINE else [relative_gap(r["val_loss"], partners[r["seed"]]) for r in of_name]
        twin = digests.setdefault(tuple((run["seed"], run["digest"]) for run in of_name), name)
        found.append(
            Row(
                precision=name,
                losses=tuple(run["val_loss"] for run in of_name if not _failed(run)),
                accuracies=tuple(run["val_accuracy"] for run in of_name if run["val_accuracy"] is not None),
                gaps=tuple(gaps),
                error=error,
                twin=None if twin == name or error else twin,
            )
        )
    return found


def holm(compared: Mapping[Any, Row]) -> set[Any]:
    """Return the keys of the rows whose mean gap is not zero, at 5 % for all rows together.

    The row with the largest t must exceed the t of the confidence 1 - 0.05 / m, the next that of 1 - 0.05 / (m - 1),
    and so on; the first that does not ends the list.
    """
    ordered = sorted(compared, key=lambda key: -compared[key].t)
    remain: set[Any] = set()
    for i, key in enumerate(ordered):
        row = compared[key]
        level = (1 - CONFIDENCE) / (len(ordered) - i)
        if len(row.gaps) < 2 or row.t <= student_t(len(row.gaps) - 1, 1 - level):
            break
        remain.add(key)
    return remain


def resolution(found: Sequence[Row]) -> float | None:
    """Return the median half width of the intervals: differences below it are not seen."""
    widths = [row.gap.half_width for row in found if row.gap is not None and any(row.gaps)]
    return statistics.median(widths) if widths else None


def _failed(run: Mapping[str, Any]) -> bool:
    return run["error"] is not None or _not_finite(run) is not None


def _not_finite(run: Mapping[str, Any]) -> str | None:
    loss = run["val_loss"]
    return None if loss is not None and math.isfinite(loss) else f"the validation loss is {loss}"
