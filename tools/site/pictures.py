"""Draw the pictures of docs/how-it-works.md.

python -m tools.site.pictures docs/pictures
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"


def values(name: str) -> torch.Tensor:
    """Return all finite values of a number format of 8 or 4 bits, float32, ascending, each once."""
    if name == "int8":
        return torch.arange(-128, 128, dtype=torch.float32)
    if name == "float4_e2m1fn":
        half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # OCP Microscaling Formats, 5.3.3
        return torch.cat([-half, half]).unique()
    every = torch.arange(256, dtype=torch.uint8).view(FORMATS[name]).float()
    return every[every.isfinite()].unique()


def spacing(grid: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the largest rounding error at magnitudes ``at``, relative to them: half the gap between neighbours."""
    above = torch.searchsorted(grid, at).clamp(1, len(grid) - 1)
    return (grid[above] - grid[above - 1]) / 2 / at


def draw_grids(path: Path) -> None:
    """Draw the positive values of the formats on one axis in powers of two."""
    figure, axes = _axes((9, 3.4))
    names = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "int8"]
    for row, name in enumerate(reversed(names)):
        grid = values(name)
        positive = grid[grid > 0]
        axes.plot(positive.log2().numpy(), [row] * len(positive), "|", color=BLUE, markersize=16, markeredgewidth=0.8)
        axes.text(17.5, row, f"{len(grid)} values\nlargest {grid.max():g}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(-17, 17)
    axes.set_xticks(range(-16, 17, 4), [f"$2^{{{power}}}$" for power in range(-16, 17, 4)])
    axes.set_title("The positive values of five number formats, without a scale", fontsize=10)
    _save(figure, path)


def draw_errors(path: Path) -> None:
    """Draw the largest relative rounding error by magnitude, for values that a scale has brought below 448 or 127."""
    figure, axes = _axes((9, 3.2))
    at = torch.logspace(-24, 0, 4000, base=2.0)
    drawn = [("float8_e4m3fn", BLUE, "-"), ("float8_e5m2", ORANGE, "-"), ("int8", GREY, "--")]
    for name, colour, line in drawn:
        grid = values(name)
        error = spacing(grid, at * grid.max()).clamp(max=1.0)
        axes.plot(at.log2().numpy(), (100 * error).numpy(), line, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_ylim(0.2, 120)
    axes.set_yticks([1, 10, 100], ["1 %", "10 %", "100 %"])
    axes.set_xlim(-24, 0)
    axes.set_xticks(range(-24, 1, 4), [f"$2^{{{power}}}$" for power in range(-24, 1, 4)])
    axes.set_xlabel("magnitude, relative to the largest value of the tensor", fontsize=9)
    axes.set_title("Largest rounding error of a value; 100 %: the value becomes 0", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _axes(size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white", metadata={"Software": None})


def main(argv: Sequence[str]) -> int:
    """Write the pictures into a folder."""
    (folder,) = argv
    draw_grids(Path(folder) / "grids.png")
    draw_errors(Path(folder) / "errors.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
