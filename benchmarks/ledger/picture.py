"""One picture: predicted time of a step by what takes the time, and peak memory, per contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.ledger.entry import Entry
from benchmarks.ledger.roofline import Rates, predict

COLOURS = {
    "products": "#3b6fb6", "attention": "#7aa6d8", "bytes, forward": "#e3b34c", "bytes, backward": "#d98032",
    "optimizer": "#9c5a8f", "gaps": "#999999",
}  # fmt: skip


def draw(entries: Sequence[Entry], rates: Rates, path: Path) -> None:
    """Write the picture as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    predictions = {e.contender: predict(e, rates) for e in entries}
    shown = sorted(entries, key=lambda e: predictions[e.contender].total)
    names = [e.contender for e in shown]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(13, 1.2 + 0.34 * len(shown)), sharey=True, width_ratios=(3, 1))
    left = [0.0] * len(shown)
    for kind, colour in COLOURS.items():
        width = [
            sum(ms for name, ms in predictions[e.contender].milliseconds.items() if name.startswith(kind))
            for e in shown
        ]
        time.barh(names, width, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for row, total in enumerate(left):
        time.text(total, row, f" {total:.0f}", va="center", fontsize=8)
    time.set_xlabel(f"PREDICTED ms per step, from counted FLOPs and bytes ({rates.label}); nothing was timed")
    time.legend(fontsize=8, loc="center right")
    time.margins(x=0.08, y=0.01)
    time.invert_yaxis()
    memory.barh(names, [e.peak / 1e9 for e in shown], color="#5f8f5f")
    for row, e in enumerate(shown):
        memory.text(e.peak / 1e9, row, f" {e.peak / 1e9:.0f}", va="center", fontsize=8)
    memory.margins(x=0.15)
    memory.set_xlabel("peak GB, counted")
    figure.suptitle(f"{shown[0].device} (null GPU), {shown[0].shape['name']}, {shown[0].tokens:,} tokens", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
