"""The pictures, each from the results alone; without matplotlib there are none, and the reason is returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import figures, part_loss
from benchmarks.gpu_lane.item import missing_library
from benchmarks.gpu_lane.linear_runs import BF16
from benchmarks.gpu_lane.results import figures_of
from lightning_lowprec.tools.compare import comparison as compared

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
    if not steps:
        return False
    steps = dict(sorted(steps.items(), key=lambda pair: pair[1]["tokens_per_s"]))
    figure.set_size_inches(9.5, 6)
    axes = figure.subplots()
    colours = ["tab:orange" if name.startswith("ours") else "tab:blue" for name in steps]
    axes.barh(list(steps), [step["tokens_per_s"] for step in steps.values()], color=colours)
    axes.set_xlabel("tokens per second")
    axes.set_title(f"8B-shaped stack: {next(iter(steps.values()))['layers']} layers")
    axes.tick_params(axis="y", labelsize=7)
    return True


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
