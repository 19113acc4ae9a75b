"""The differences from float32 of many precisions on several models, with all comparisons in mind.

Of many 95 % intervals one in twenty leaves out zero by chance. Holm's procedure (Scandinavian Journal of Statistics 6,
1979) says which differences remain if the chance of even one false claim among all comparisons is to be at most 5 %.
All intervals have the same degrees of freedom, so the order of the p-values is that of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lowprec.tools.compare.comparison import CONFIDENCE, Interval, relative_gap, student_t
from lightning_lowprec.tools.output import format_table

Gaps = Sequence[float]
"""Relative differences from the baseline, one per seed."""


def gaps_of(results: Mapping[str, Any]) -> dict[str, Gaps | None]:
    """Return the gaps of each precision but the baseline, from a ``results.json``; None where a run failed."""
    losses: dict[str, dict[int, float]] = {}
    for run in results["results"]:
        losses.setdefault(run["name"], {})[run["seed"]] = math.nan if run["final_val"] is None else run["final_val"]
    baseline, *names = results["spec"]["precisions"]
    found: dict[str, Gaps | None] = {}
    for name in names:
        gaps = [relative_gap(loss, losses[baseline][seed]) for seed, loss in losses[name].items()]
        found[name] = gaps if all(map(math.isfinite, gaps)) else None
    return found


def t_of(gaps: Gaps) -> float:
    """Return the distance of the mean gap from zero, in standard errors; 0 if all gaps are zero."""
    gap = Interval.of(gaps)
    if gap.mean == 0:
        return 0.0
    error = gap.half_width / student_t(len(gaps) - 1)
    return abs(gap.mean) / error if error else math.inf


def holm(compared: Mapping[Any, Gaps]) -> set[Any]:
    """Return the keys of the gaps whose mean is not zero, at 5 % for all of them together.

    The largest t must exceed the t of the confidence 1 - 0.05 / m, the next that of 1 - 0.05 / (m - 1), and so on; the
    first that does not ends the list.
    """
    ordered = sorted(compared, key=lambda key: -t_of(compared[key]))
    remain: set[Any] = set()
    for i, key in enumerate(ordered):
        level = (1 - CONFIDENCE) / (len(ordered) - i)
        if t_of(compared[key]) <= student_t(len(compared[key]) - 1, 1 - level):
            break
        remain.add(key)
    return remain


def overview(by_model: Mapping[str, Mapping[str, Gaps | None]]) -> str:
    """Return a table in Markdown: a row per precision, a column per model; bold: differs after Holm's procedure."""
    found = {(model, name): gaps for model, names in by_model.items() for name, gaps in names.items()}
    remain = holm({key: gaps for key, gaps in found.items() if gaps is not None})

    def cell(model: str, name: str) -> str:
        if (model, name) not in found:
            return "-"
        gaps = found[model, name]
        if gaps is None:
            return "fails"
        words = Interval.of(gaps).percent() if any(gaps) else "equal"
        return f"**{words}**" if (model, name) in remain else words

    names = list(dict.fromkeys(name for _, name in found))
    rows = [["precision", *by_model], *([name, *(cell(model, name) for model in by_model)] for name in names)]
    lines = format_table(rows, right=range(1, len(rows[0])), markdown=True)
    return "\n".join(line.replace("\\*\\*", "**") for line in lines)
