"""Weights with a scale per square tile: what every format of such weights does alike.

The codes of a weight are made once, serve forward and backward, and are what FSDP2 gathers. A format says the ``tile``
and its ``coding``: the dtype of codes, and scales from largest values.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import encode
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tiles import Tile, largest, spread
from lightning_lowprec.products.arithmetic import Codes, Role, Transposable


class Tiled(Transposable):
    """An arithmetic in which a weight has a scale per tile, where ``coding("weight")`` is not None."""

    tile: ClassVar[Tile]
    """Rows and columns of a tile, equal."""

    def encoded(self, matrix: Tensor, role: Role) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of a weight."""
        return encode_tiles(matrix.detach(), self.tile, self.coding("weight"))  # no Parameter: one kernel on CUDA

    def encode_rows(self, values: Tensor, scale: Tensor, first: int) -> Tensor:
        """Return the codes of some rows of a weight, or of a stack, from the row ``first`` on, by all tiles' scales."""
        codes = _encode_rows(values.flatten(0, -2), scale, self.tile, first, self.coding("weight").dtype)
        return codes.view(values.shape)

    def decode(self, codes: Tensor, scale: Tensor, first: int = 0) -> Tensor:
        """Return the values of codes, the rows from ``first`` on, by the scales of all tiles: float32."""
        rows = codes.flatten(0, -2).float()
        return (rows * spread(scale.reciprocal(), self.tile, rows.shape, first)).view(codes.shape)


@compiled_on_cuda
def encode_tiles(values: Tensor, tile: Tile, coding: Any) -> Codes:
    """Return codes and scales: [A, B] any float."""
    scale = coding.scales(largest(values, tile).float())
    return Codes(encode(values, spread(scale, tile, values.shape), coding.dtype).contiguous(), scale)


@compiled_on_cuda
def _encode_rows(values: Tensor, scale: Tensor, tile: Tile, first: int, dtype: torch.dtype) -> Tensor:
    return encode(values, spread(scale, tile, values.shape, first), dtype)
