"""Draw the losses of a comparison with matplotlib, without a display and without global state."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then the colours of Okabe and Ito, which most colour-blind people can tell apart."""
SMOOTHING_SHARE = 20
"""The smoothed training loss is an average over a twentieth of the steps."""


def loss_picture(comparison: Comparison) -> bytes:
    """Return a PNG: the training loss, the validation metric, and its distance from the baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained", dpi=100)
    train, val, gap = figure.subplots(1, 3)
    _draw_train(train, comparison.results)
    _draw_val(val, comparison)
    _draw_gap(gap, comparison)
    handles, labels = train.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` values on both sides: no lag behind a falling loss."""
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]


def _draw_train(axes: Axes, results: Sequence[PrecisionResult]) -> None:
    reach = max(len(result.train_losses) for result in results) // SMOOTHING_SHARE // 2
    for i, result in enumerate(results):
        steps = range(1, len(result.train_losses) + 1)
        axes.plot(steps, result.train_losses, color=_colour(i), alpha=0.15, linewidth=0.8)
        axes.plot(steps, smooth(result.train_losses, reach), **_style(i, result.name))
    note = f"mean of {2 * reach + 1} steps; faint: each step" if reach else "each step"
    _label(axes, f"Training loss ({note})", "loss")


def _draw_val(axes: Axes, comparison: Comparison) -> None:
    for i, result in enumerate(comparison.results):
        axes.plot(result.val_steps, result.val_losses, marker="o", markersize=4, **_style(i, result.name))
    _label(axes, "Validation, the same batches each time", comparison.spec.val_metric)


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
    _label(axes, f"Distance from {baseline.name} (green: ±{allowed:g} %)", f"{comparison.spec.val_metric}, %")


def _style(index: int, name: str) -> dict[str, Any]:
    """Return the style of a curve: the baseline is wide and below, so that equal curves stay visible."""
    if index == 0:
        return {"color": _colour(0), "linewidth": 4.0, "alpha": 0.45, "label": name, "solid_capstyle": "round"}
    line = ("-", "--", "-.", ":")[(index - 1) % 4]
    return {"color": _colour(index), "linewidth": 1.6, "linestyle": line, "label": name}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _label(axes: Axes, title: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
