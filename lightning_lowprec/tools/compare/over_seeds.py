"""The parts of a report that only a comparison over several seeds has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_lowprec.tools.compare.comparison import Comparison
from lightning_lowprec.tools.compare.paired import Cost
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.table import format_table

HOW_COMPARED = (
    "Each run is compared with the baseline's run of the same seed, which begins with the same weights and reads the"
    " same batches. The gap is the mean of these relative differences. ± after a gap or after steps is the 95 %"
    " confidence interval of the mean (Student's t); ± after a loss is the standard deviation over the seeds. A"
    " precision passes if the whole interval of its gap is within the bound.\n\nMore steps: how much longer the"
    " precision must train to reach the baseline's training loss. The baseline's loss is smoothed by a straight line"
    " over the logarithm of the step, through the second half of the run; the difference is that of the mean loss of"
    " the last tenth of the steps. Not measured where this line falls by less than two standard errors, and for"
    " differences larger than the fall of this line in the second half."
)


def sentences(comparison: Comparison) -> list[str]:
    """Return one sentence on the cost of each precision that was judged."""
    metric = comparison.spec.val_metric
    return [f"{name} {_cost(cost, metric)}" for name, cost in comparison.costs.items()]


def _cost(cost: Cost, metric: str) -> str:
    if not any(cost.gaps):
        return f"ends with the baseline's {metric} with every seed."
    if cost.gap.holds_zero:
        said = f"cannot be told apart from the baseline: {cost.gap.percent()} of {metric}"
    else:
        said = f"{'costs' if cost.gap.mean > 0 else 'saves'} {cost.gap.percent(sign=False)} of {metric}"
    if cost.more_steps is None:
        return f"{said}. Its cost in steps is not measured: {cost.no_steps}."
    if cost.gap.holds_zero:
        return f"{said}, and {cost.more_steps.percent(1)} steps."
    kind = "more" if cost.more_steps.mean >= 0 else "fewer"
    return f"{said}, or {cost.more_steps.percent(1, sign=False)} {kind} steps."


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the cells of the table with one row per precision, header first."""
    header = ("precision", comparison.spec.val_metric, "gap", "more steps", "train loss", "step time", "peak memory")
    cells: list[tuple[str, ...]] = [(*header, "verdict")]
    for (name, runs), verdict in zip(comparison.runs.items(), comparison.verdicts, strict=True):
        cost = comparison.costs.get(name)
        steps = None if cost is None else cost.more_steps
        cells.append(
            (
                name,
                _spread([run.final_val for run in runs]),
                "-" if cost is None else cost.gap.percent(),
                "-" if steps is None else steps.percent(1),
                _spread([run.final_train for run in runs]),
                _step_time(runs),
                _peak_memory(runs),
                verdict.text,
            )
        )
    return cells


def table_of_seeds(comparison: Comparison) -> list[str]:
    """Return the table of the final metric of each run, one row per seed, in Markdown."""
    rows = [("seed", *comparison.runs)]
    for of_seed in zip(*comparison.runs.values(), strict=True):
        values = ("-" if run.final_val is None else f"{run.final_val:.4f}" for run in of_seed)
        rows.append((str(of_seed[0].seed), *values))
    return format_table(rows, right=range(1, len(rows[0])), markdown=True)


def _spread(values: Sequence[float | None]) -> str:
    """Return mean and standard deviation of the values that there are."""
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    mean = f"{statistics.fmean(found):.4f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found):.4f}"


def _step_time(runs: Sequence[PrecisionResult]) -> str:
    times = [run.step_time for run in runs if run.step_time is not None]
    return f"{1e3 * statistics.median(times):.1f} ms" if times else "-"


def _peak_memory(runs: Sequence[PrecisionResult]) -> str:
    bytes_held = [run.peak_memory for run in runs if run.peak_memory is not None]
    return f"{max(bytes_held) * 2**-20:.0f} MiB" if bytes_held else "-"
