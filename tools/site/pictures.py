"""Draw the pictures of docs/how-it-works.md.

python -m tools.site.pictures docs/pictures
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_lowprec.numerics.tensor_cores import accumulate

FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
FACTORS: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
    "normal": lambda k: (torch.randn(ROWS, k), torch.randn(ROWS, k)),
    "relu(x)^2, weights of mean 0.2": lambda k: (torch.randn(ROWS, k).relu().square(), torch.randn(ROWS, k) + 0.2),
    "absolute values of normal": lambda k: (torch.randn(ROWS, k).abs(), torch.randn(ROWS, k).abs()),
}
"""The data of the table of sums: factors of (ROWS, K) by name."""
ROWS = 64


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


@functools.cache
def lost_on_hopper(data: str, k: int) -> tuple[float, float, float, float]:
    """Return signal to noise in dB of the rounding to e4m3 with one scale, of fast and of promoted sums on Hopper.

    The fourth number is the part by which fast sums are too large. Sums are compared with exact sums of the same codes.
    """
    torch.manual_seed(0)
    factors = FACTORS[data](k)
    scales = [448 / factor.abs().max() for factor in factors]
    a, b = ((factor * scale).to(torch.float8_e4m3fn) for factor, scale in zip(factors, scales, strict=True))
    exact = a.double() @ b.double().T
    before = factors[0].double() @ factors[1].double().T * scales[0] * scales[1]
    fast, promoted = (accumulate(a, b, "hopper", choice).double() for choice in (True, False))
    noise = [(one - other).norm() / other.norm() for one, other in ((exact, before), (fast, exact), (promoted, exact))]
    slope = float((fast * exact).sum() / exact.square().sum()) - 1
    rounding, of_fast, of_promoted = (-20 * float(part.log10()) for part in noise)
    return rounding, of_fast, of_promoted, slope


def draw_sums(path: Path) -> None:
    """Draw what sums of products lose on Hopper, by the number of products."""
    figure, axes = _axes((9, 3.2))
    lengths = [2**power for power in range(7, 15)]
    for data, colour in zip(FACTORS, (GREY, ORANGE, BLUE), strict=True):
        lost = [lost_on_hopper(data, k) for k in lengths]
        axes.plot(lengths, [fast for _, fast, _, _ in lost], "o-", color=colour, label=data)
        axes.plot(lengths, [promoted for _, _, promoted, _ in lost], "--", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("products in a sum (K)", fontsize=9)
    axes.set_ylabel("signal to noise, dB", fontsize=9)
    axes.set_title("Sums on Hopper; solid: fast accumulation, dashed: a new sum every 128 products", fontsize=10)
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
    draw_sums(Path(folder) / "sums.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
