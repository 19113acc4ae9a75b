"""The pictures, each from the results alone; without matplotlib there are none, and the reason is returned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import figures, part_loss
from benchmarks.gpu_lane.contenders import BASELINE
from benchmarks.gpu_lane.item import missing_library
from benchmarks.gpu_lane.linear_runs import BF16
from benchmarks.gpu_lane.results import figures_of
from lightning_lowprec.tools.compare import pictures as compared

Data = dict[str, Any]


NAMES = {"optimizer": "moments"}


def draw(data: Data, folder: Path) -> dict[str, str]:
    """Write what can be drawn; returns by name what could not, and why."""
    reason = missing_library(("matplotlib",))
    if reason is not None:
        return {"all plots": reason}
    import matplotlib

    matplotlib.use("Agg")
    pictures: dict[str, Callable[[Data, Any], bool]] = {"linear": _linear, "steps": _steps, "memory": _memory}
    problems = {}
    for name, picture in pictures.items():
        try:
            _one(name, picture, data, folder)
        except Exception as error:  # a picture is no reason to lose figures
            problems[name] = f"{type(error).__name__}: {error}"
    losses = part_loss.comparison(data)
    if losses is not None:
        (folder / "loss.png").write_bytes(compared.png(losses.spec, losses.runs))
    return problems


def _one(name: str, picture: Callable[[Data, Any], bool], data: Data, folder: Path) -> None:
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 6), layout="constrained")
    try:
        if picture(data, figure):
            figure.savefig(folder / f"{name}.png", dpi=110)
    finally:
        pyplot.close(figure)


def _linear(data: Data, figure: Any) -> bool:
    rows = {shape: figures.ratios(row) for shape, row in figures.linear_rows(data).items()}
    axes = figure.subplots()
    for name in dict.fromkeys(name for row in rows.values() for name in row if name != BF16):
        points = [(index, row[name]) for index, row in enumerate(rows.values()) if name in row]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [" x ".join(map(str, shape)) for shape in rows], rotation=75, fontsize=7)
    axes.set_ylabel("times faster than bf16")
    axes.set_title("one Linear, forward + backward, by M x K x N")
    if rows:
        axes.legend(fontsize=8)
    return bool(rows)


def _steps(data: Data, figure: Any) -> bool:
    steps = figures.comparable(data, "step8b")
    if steps:
        figure.set_size_inches(9.5, 12)
        above, below = figure.subplots(2)
        _speed(steps, above, f"8B-shaped stack: {next(iter(steps.values()))['layers']} layers")
        _loss(steps, below)
    return bool(steps)


def _speed(steps: Data, axes: Any, title: str) -> None:
    steps = dict(sorted(steps.items(), key=lambda pair: pair[1]["tokens_per_s"]))
    colours = ["tab:orange" if name.startswith("ours") else "tab:blue" for name in steps]
    axes.barh(list(steps), [step["tokens_per_s"] for step in steps.values()], color=colours)
    axes.set_xlabel("tokens per second")
    axes.set_title(title)
    axes.tick_params(axis="y", labelsize=7)


def _loss(steps: Data, axes: Any) -> None:
    """Against the baseline, where there is one: the curves themselves lie on each other."""
    base = [float(loss) for loss in steps[BASELINE]["losses"]] if BASELINE in steps else None
    others = {name: step for name, step in steps.items() if name != BASELINE}
    styles = [(line, colour) for line in ("-", "--", ":") for colour in range(10)]
    for (name, step), (line, colour) in zip(others.items(), cycle(styles), strict=False):
        losses = [float(loss) for loss in step["losses"]]
        values = losses if base is None else [a - b for a, b in zip(losses, base, strict=False)]
        axes.plot(values, label=name, linestyle=line, color=f"C{colour}", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss" if base is None else f"training loss less that of {BASELINE}")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _memory(data: Data, figure: Any) -> bool:
    found = figures_of(data, "memory")
    axes = figure.subplots()
    left = dict.fromkeys(found, 0.0)
    for kind in ("weights", "gradients", "masters", "optimizer"):
        sizes = {key: row["bytes_per_parameter"][kind] for key, row in found.items()}
        axes.barh(list(sizes), list(sizes.values()), left=[left[key] for key in sizes], label=NAMES.get(kind, kind))
        left = {key: left[key] + size for key, size in sizes.items()}
    axes.set_xlabel("bytes per parameter")
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=4)
    return bool(found)
