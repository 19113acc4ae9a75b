"""The pictures of a report, drawn with matplotlib's Agg: no display, no global state."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The baseline in grey, then Okabe and Ito's colours, which most colour-blind people can tell apart."""
SMOOTHING_SHARE = 20
"""The smoothed training loss averages over a twentieth of the steps."""


def loss_picture(comparison: Comparison) -> bytes:
    """Training loss, validation metric, and its distance from the baseline: a PNG."""
    figure = _figure(15, 4.4)
    train, val, gap = figure.subplots(1, 3)
    _draw_train(train, comparison.results)
    _draw_val(val, comparison)
    _draw_gap(gap, comparison)
    handles, labels = train.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    return _png(figure)


def cost_picture(comparison: Comparison) -> bytes:
    """Step time and peak memory: a PNG."""
    figure = _figure(15, 1.6 + 0.45 * len(comparison.results))
    time, memory = figure.subplots(1, 2)
    results = comparison.results
    times = [None if r.step_time is None else 1e3 * r.step_time for r in results]
    _draw_bars(time, results, times, "Step time", "median, milliseconds", "{:.0f} ms")
    sizes = [None if r.peak_memory is None else r.peak_memory / 2**20 for r in results]
    _draw_bars(memory, results, sizes, "Peak memory during training", "MiB", "{:.0f} MiB")
    return _png(figure)


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and up to `reach` values on both sides: it does not lag behind a falling loss."""
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]


def _draw_train(axes: Axes, results: Sequence[PrecisionResult]) -> None:
    reach = max(len(result.train_losses) for result in results) // SMOOTHING_SHARE // 2
    for i, result in enumerate(results):
        steps = range(1, len(result.train_losses) + 1)
        axes.plot(steps, result.train_losses, color=_colour(i), alpha=0.15, linewidth=0.8)
        axes.plot(steps, smooth(result.train_losses, reach), **_style(i, result.name))
    note = f"mean of {2 * reach + 1} steps; faint: each step" if reach else "each step"
    _label_steps(axes, f"Training loss ({note})", "loss")


def _draw_val(axes: Axes, comparison: Comparison) -> None:
    for i, result in enumerate(comparison.results):
        axes.plot(result.val_steps, result.val_losses, marker="o", markersize=4, **_style(i, result.name))
    _label_steps(axes, "Validation, the same batches each time", comparison.spec.val_metric)


def _draw_gap(axes: Axes, comparison: Comparison) -> None:
    baseline, *others = comparison.results
    reference = dict(zip(baseline.val_steps, baseline.val_losses, strict=True))
    allowed = 100 * comparison.spec.max_loss_gap
    axes.axhspan(-allowed, allowed, color="#009e73", alpha=0.10, linewidth=0)
    axes.axhline(0, **_style(0, baseline.name))
    for i, result in enumerate(others, start=1):
        pairs = [
            (s, v, reference[s]) for s, v in zip(result.val_steps, result.val_losses, strict=True) if reference.get(s)
        ]
        gaps = [100 * (value - base) / abs(base) for _, value, base in pairs]
        axes.plot([step for step, _, _ in pairs], gaps, marker="o", markersize=4, **_style(i, result.name))
    low, high = axes.get_ylim()
    reach = max(abs(low), abs(high), 1.3 * allowed)
    axes.set_ylim(-reach, reach)
    _label_steps(axes, f"Distance from {baseline.name} (green: ±{allowed:g} %)", f"{comparison.spec.val_metric}, %")


def _draw_bars(
    axes: Axes, results: Sequence[PrecisionResult], values: Sequence[float | None], title: str, unit: str, form: str
) -> None:
    names = [result.name for result in results]
    bars = axes.barh(names, [value or 0 for value in values], color=[_colour(i) for i in range(len(names))], height=0.6)
    axes.bar_label(bars, ["n/a" if value is None else form.format(value) for value in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max([value or 0 for value in values] + [1e-9]))
    _label(axes, title, unit, "")
    axes.grid(False, axis="y")


def _style(index: int, name: str) -> dict[str, Any]:
    """The baseline wide below, the others narrower above it, so that curves that coincide stay visible."""
    if index == 0:
        return {"color": _colour(0), "linewidth": 4.0, "alpha": 0.45, "label": name, "solid_capstyle": "round"}
    line = ("-", "--", "-.", ":")[(index - 1) % 4]
    return {"color": _colour(index), "linewidth": 1.6, "linestyle": line, "label": name}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _label_steps(axes: Axes, title: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    _label(axes, title, "step", y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=100)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
