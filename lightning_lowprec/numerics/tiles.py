"""Tiles of a matrix that share a scale: their largest values, and their scales spread over the values.

A tile at the lower or right edge may be smaller. Tiles of one row, or of one column, are blocks of what a product sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.one_pass import compiled_on_cuda

Tile = tuple[int, int]
"""Rows and columns of a tile."""


@compiled_on_cuda
def largest(values: Tensor, tile: Tile) -> Tensor:
    """Return the largest absolute value of every tile: [A, B] any float -> [ceil(A / rows), ceil(B / columns)]."""
    rows, columns = tile
    magnitude, (a, b) = values.abs(), values.shape
    if a % rows or b % columns:
        magnitude = F.pad(magnitude, (0, -b % columns, 0, -a % rows))
    return magnitude.reshape(-(-a // rows), rows, -(-b // columns), columns).amax((1, 3))


def largest_of_rows(values: Tensor, tile: Tile, rows: int, first: int) -> Tensor:
    """Return the largest values of all tiles of a matrix with ``rows`` rows, of which some are known.

    values: [A, B] any float, the rows from ``first`` on -> the grid of the matrix, float32, 0 in tiles of other rows.
    """
    begin = first % tile[0]
    found = largest(F.pad(values, (0, 0, begin, 0)) if begin else values, tile).float()
    grid = found.new_zeros(-(-rows // tile[0]), found.shape[1])
    grid[first // tile[0] :][: len(found)] = found
    return grid


def spread(grid: Tensor, tile: Tile, shape: torch.Size, first: int = 0) -> Tensor:
    """Return the value of its tile for every element: the grid of a matrix -> [A, B], or [A, 1] if it has one column.

    ``shape``, [A, B], is that of some rows of the matrix, which begin with the row ``first``.
    """
    rows, columns = tile
    if rows > 1 or len(grid) > shape[0]:
        grid = grid[torch.arange(first, first + shape[0], device=grid.device) // rows]
    if grid.shape[1] == 1:
        return grid
    return grid[:, :, None].expand(-1, -1, columns).reshape(len(grid), -1)[:, : shape[1]]
