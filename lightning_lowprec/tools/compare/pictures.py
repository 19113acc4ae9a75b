"""Draw the losses of a comparison with matplotlib, without a display and without global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_lowprec.tools.compare.result import Comparison, relative_gap

COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then the colours of Okabe and Ito, which most colour-blind people can tell apart."""
SMOOTHING_SHARE = 20
"""The smoothed training loss is an average over a twentieth of the steps."""


def draw_losses(comparison: Comparison, path: Path) -> None:
    """Write a PNG: the training loss, the validation metric, and its distance from the baseline."""
    from matplotlib.figure import Figure

    spec, results = comparison.spec, comparison.results
    figure = Figure(figsize=(15, 4.4), layout="constrained", dpi=100)
    train, val, gap = figure.subplots(1, 3)
    reach = max(len(result.train_losses) for result in results) // SMOOTHING_SHARE // 2
    allowed = 100 * spec.max_loss_gap
    gap.axhspan(-allowed, allowed, color="#009e73", alpha=0.10, linewidth=0)
    for i, result in enumerate(results):
        style = _style(i)
        losses = smooth(result.train_losses, reach)
        train.plot(range(1, len(losses) + 1), losses, label=result.name, **style)
        val.plot(result.val_steps, result.val_losses, marker="o", markersize=4, **style)
        gaps = [100 * relative_gap(*pair) for pair in zip(result.val_losses, results[0].val_losses, strict=False)]
        gap.plot(result.val_steps[: len(gaps)], gaps, marker="o", markersize=4, **style)
    train.set(title=f"Training loss (mean of {2 * reach + 1} steps)", ylabel="loss")
    val.set(title="Validation, the same batches each time", ylabel=spec.val_metric)
    gap.set(title=f"Distance from {spec.baseline} (green: ±{allowed:g} %)", ylabel=f"{spec.val_metric}, %")
    for axes in (train, val, gap):
        axes.set_xlabel("step")
        axes.grid(True, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=min(len(results), 6), frameon=False)
    figure.savefig(path)


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` values on both sides: no lag behind a falling loss."""
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]


def _style(index: int) -> dict[str, Any]:
    """Return the style of a curve: the baseline is wide and below, so that equal curves stay visible."""
    colour = COLOURS[index % len(COLOURS)]
    if index == 0:
        return {"color": colour, "linewidth": 4.0, "alpha": 0.45}
    return {"color": colour, "linewidth": 1.6, "linestyle": ("-", "--", "-.", ":")[(index - 1) % 4]}
