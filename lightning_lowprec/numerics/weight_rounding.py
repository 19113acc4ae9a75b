"""How a weight is rounded to e4m3: one scale per weight, per row, or per block of 128 x 128, and by which arithmetic.

    codes = round(clamp(weight * scale))        # [N, K] float8_e4m3fn
    weight ~ codes * inv_scale                  # inv_scale = 1 / scale, float32

Scales are handled as a grid: [1, 1] for one scale, [N, 1] for a scale per row, [ceil(N / 128), ceil(K / 128)] for
blocks. The largest absolute values of rows and blocks need those rows only, so a large weight can be rounded some rows
at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from lightning_lowprec.numerics import tiles
from lightning_lowprec.numerics.formats import E4M3, encode

ScalePer = Literal["tensor", "row", "block"]
BLOCK: Final = 128
"""Rows and columns of a block."""


@dataclass(frozen=True, kw_only=True)
class WeightRounding:
    """How the forward of a layer rounds its weight to e4m3."""

    scale_per: ScalePer
    """What has a scale of its own."""
    scale_of: Callable[[Tensor], Tensor]
    """Returns the scales of largest absolute values: (...) float32 -> (...) float32."""
    as_trained: Callable[[Tensor], Tensor] | None = None
    """Returns the half-precision weight that the forward rounded, of its float32 master; None: the weight itself."""


def nearest_scale(amax: Tensor) -> Tensor:
    """Return ``448 / amax``, rounded once: (...) float32 -> (...) float32; 1 where ``amax`` is 0 or not finite."""
    scale = (E4M3.max / amax.double()).float().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def amax_grid(values: Tensor, scale_per: ScalePer) -> Tensor:
    """Return the largest absolute values: [N, K] any float -> the grid of scales, float32; NaN stays NaN."""
    if scale_per == "tensor":
        return values.abs().amax().float().reshape(1, 1)
    rows = values.abs().float()
    if scale_per == "row":
        return rows.amax(dim=1, keepdim=True)
    return tiles.largest(rows, (BLOCK, BLOCK))


def spread(grid: Tensor, shape: torch.Size) -> Tensor:
    """Return a scale for every element, or what broadcasts to that: the grid of a weight [N, K] -> [N or 1, K or 1]."""
    if grid.shape[0] in (1, shape[0]) and grid.shape[1] == 1:
        return grid
    return tiles.spread(grid, (BLOCK, BLOCK), shape)


def codes(values: Tensor, grid: Tensor) -> Tensor:
    """Round a weight: [N, K] any float, the grid of scales -> [N, K] float8_e4m3fn."""
    return encode(values, spread(grid, values.shape), E4M3.dtype)
