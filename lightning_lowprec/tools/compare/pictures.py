"""Draw the losses of a comparison with matplotlib, without a display and without global state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from lightning_lowprec.tools.compare.paired import Interval
from lightning_lowprec.tools.compare.result import PrecisionResult, relative_gap
from lightning_lowprec.tools.compare.spec import CompareSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[PrecisionResult]]
"""For each precision, its runs in the order of the seeds."""
COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then the colours of Okabe and Ito, which most colour-blind people can tell apart."""
SMOOTHING_SHARE = 20
"""The smoothed training loss is an average over a twentieth of the steps."""


def png(spec: CompareSpec, runs: Runs) -> bytes:
    """Return the picture as the content of a PNG file, the same bytes for the same figures."""
    content = BytesIO()
    picture(spec, runs).savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def picture(spec: CompareSpec, runs: Runs) -> Figure:
    """Return the training loss, the validation metric and its distance from the baseline; seeds make bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained", dpi=100)
    train, val, gap = figure.subplots(1, 3)
    reach = max(len(run.train_losses) for of_name in runs.values() for run in of_name) // SMOOTHING_SHARE // 2
    allowed = 100 * spec.max_loss_gap
    gap.axhspan(-allowed, allowed, color="#009e73", alpha=0.10, linewidth=0)
    for i, of_name in enumerate(runs.values()):
        style = _style(i)
        trained = _curves([smooth(run.train_losses, reach) for run in of_name])
        _draw(train, range(1, len(trained) + 1), trained, style, label=of_name[0].name)
        points = {**style, "marker": "o", "markersize": 4}
        values = _curves([run.val_losses for run in of_name])
        steps = max((run.val_steps for run in of_name), key=len)
        _draw(val, steps[: len(values)], values, points)
        gaps = _curves([_gaps(*pair) for pair in zip(of_name, runs[spec.baseline], strict=True)])
        _draw(gap, steps[: len(gaps)], gaps, points, intervals=True)
    train.set(title=f"Training loss (mean of {2 * reach + 1} steps)", ylabel="loss")
    val.set(title="Validation, the same batches each time", ylabel=spec.val_metric)
    if spec.seeds > 1:
        figure.suptitle(f"Mean of {spec.seeds} seeds; bands: all seeds (left, middle), 95 % confidence (right)")
    gap.set(title=f"Distance from {spec.baseline} (green: ±{allowed:g} %)", ylabel=f"{spec.val_metric}, %")
    for axes in (train, val, gap):
        axes.set_xlabel("step")
        axes.grid(True, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=min(len(runs), 6), frameon=False)
    return figure


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` values on both sides: no lag behind a falling loss."""
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]


def _curves(curves: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Return the values of all seeds at each point; a run that ended early counts only if all runs did."""
    longest = max(map(len, curves))
    return list(zip(*(curve for curve in curves if len(curve) == longest), strict=True))


def _gaps(run: PrecisionResult, baseline: PrecisionResult) -> list[float]:
    return [100 * relative_gap(*pair) for pair in zip(run.val_losses, baseline.val_losses, strict=False)]


def _draw(
    axes: Any,
    steps: Sequence[int],
    values: Sequence[tuple[float, ...]],
    style: dict[str, Any],
    *,
    label: str | None = None,
    intervals: bool = False,
) -> None:
    """Draw the mean of the seeds, and with several seeds a band: from the least to the largest, or the interval."""
    axes.plot(steps, [statistics.fmean(of_step) for of_step in values], label=label, **style)
    if values and len(values[0]) > 1:
        bands = [_interval(of_step) if intervals else (min(of_step), max(of_step)) for of_step in values]
        axes.fill_between(steps, *zip(*bands, strict=True), color=style["color"], alpha=0.15, linewidth=0)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    found = Interval.of(values)
    return found.mean - found.half_width, found.mean + found.half_width


def _style(index: int) -> dict[str, Any]:
    """Return the style of a curve: the baseline is wide and below, so that equal curves stay visible."""
    colour = COLOURS[index % len(COLOURS)]
    if index == 0:
        return {"color": colour, "linewidth": 4.0, "alpha": 0.45}
    return {"color": colour, "linewidth": 1.6, "linestyle": ("-", "--", "-.", ":")[(index - 1) % 4]}
