"""Draw the gaps with their intervals, with matplotlib and without a display."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.convergence.gaps import Row
from benchmarks.convergence.results import Results
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.compare.comparison import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAPS = "gaps.png"
FAMILIES: Final = {
    "HalfMixed": ("bf16 and fp16 of this package", COLOURS[1], "s"),
    "FP8TorchAO": ("FP8", COLOURS[2], "o"),
    "Int8TorchAO": ("int8", COLOURS[3], "D"),
    "MXFP8": ("MXFP8", COLOURS[4], "^"),
    "fp8-block": ("FP8 in blocks", COLOURS[2], "s"),
    "MSAMP": ("MS-AMP", COLOURS[5], "v"),
}
"""The words, the colour and the shape of a family of names, by the class of the plugin."""
LIGHTNING: Final = ("Lightning's own", COLOURS[0], "P")
ROW = 0.215  # inches per name


def draw(results: Results, folder: Path) -> None:
    """Write the picture."""
    gaps(results).savefig(folder / GAPS)


def gaps(results: Results) -> Figure:
    """Return a panel per subject with a row per precision: the mean gap and its interval."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    keys = [key for key in results.compared if any(row.gap for row in results.rows[key])]
    names = list(dict.fromkeys(row.precision for key in keys for row in results.rows[key][1:]))
    figure = Figure(figsize=(2.6 + 2.9 * max(1, len(keys)), 1.9 + ROW * len(names)), layout="constrained", dpi=100)
    panels = figure.subplots(1, max(1, len(keys)), sharey=True, squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=False):
        _panel(axes, results, key, names)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].set_ylim(len(names) - 0.3, -0.7)
    marks = [Line2D([], [], color=colour, marker=mark, linestyle="-", label=words)
             for words, colour, mark in (LIGHTNING, *FAMILIES.values())]  # fmt: skip
    marks.append(
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="no difference shown")
    )
    marks.append(Line2D([], [], color="black", marker="o", linestyle="", label="differs after Holm's procedure"))
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(
        f"Validation loss against float32, {results.data['seeds']} seeds: mean and 95 % interval. Right is worse.",
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, results: Results, key: str, names: Sequence[str]) -> None:
    by_name = {row.precision: row for row in results.rows[key]}
    shown = [row.gap for row in by_name.values() if row.gap is not None]
    reach = 100 * max(abs(gap.mean) + gap.half_width for gap in shown) or 1.0
    usual = 100 * statistics.median(abs(gap.mean) + gap.half_width for gap in shown) or reach
    limit = min(1.1 * reach, 6 * usual)  # one wide interval must not hide the others
    axes.axvline(0, color=COLOURS[0], linewidth=1)
    for at, name in enumerate(names):
        row = by_name.get(name)
        if at % 2:
            axes.axhspan(at - 0.5, at + 0.5, color="black", alpha=0.04, linewidth=0)
        if row is None:
            _say(axes, at, "not run")
        elif row.error is not None:
            _say(axes, at, "fails")
        elif row.gap is not None:
            _interval(axes, at, row, limit, filled=(key, name) in results.remaining)
    axes.set_xlim(-limit, limit)
    axes.set_title(results.titles[key], fontsize=9)
    axes.set_xlabel("gap, %", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(True, axis="x", alpha=0.25)


def _interval(axes: Axes, at: int, row: Row, limit: float, *, filled: bool) -> None:
    assert row.gap is not None
    _, colour, mark = family(row.precision)
    mean, half = 100 * row.gap.mean, 100 * row.gap.half_width
    axes.plot([mean - half, mean + half], [at, at], color=colour, linewidth=1.4)
    if abs(mean) <= limit:
        axes.plot(mean, at, mark, color=colour, markersize=5, markerfacecolor=colour if filled else "white")
    else:
        edge = limit if mean > 0 else -limit
        axes.annotate(f"{mean:+.1f} %", (edge, at), ha="right" if mean > 0 else "left", va="center", fontsize=7)


def _say(axes: Axes, at: int, words: str) -> None:
    axes.annotate(
        words, (0, at), xytext=(4, 0), textcoords="offset points", ha="left", va="center", fontsize=7, color="#666666"
    )


def family(name: str) -> tuple[str, str, str]:
    """Return the words, the colour and the shape of the family that a name belongs to."""
    if name not in TABLE:
        return LIGHTNING
    row = TABLE[name]
    known = (key for key in (row.format, name.rpartition("-")[0], name, row.plugin.__name__) if key in FAMILIES)
    return FAMILIES[next(known)]
