"""Weights with a scale per square tile: the codes are made once, serve forward and backward, and FSDP2 gathers them."""

from typing import ClassVar

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import encode
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tiles import Tile, largest, spread
from lightning_lowprec.products.arithmetic import Codes, Coding, Role, Transposable


class Tiled(Transposable):
    """An arithmetic in which a weight has a scale per tile, and an input or a gradient one per block of a row."""

    tile: ClassVar[Tile]
    of_weights: ClassVar[Coding]

    def coding(self, role: Role) -> Coding | None:
        """Return the coding of weights."""
        return self.of_weights if role == "weight" else None

    def encoded(self, weight: Tensor) -> Codes:
        """Return the codes and the scales of a weight."""
        return encode_tiles(weight.detach(), self.tile, self.of_weights)  # no Parameter: one kernel on CUDA

    def encode_rows(self, values: Tensor, scale: Tensor, first: int) -> Tensor:
        """Return the codes of some rows of a weight, or of a stack, from the row ``first`` on, by all tiles' scales."""
        codes = _encode_rows(values.flatten(0, -2), scale, self.tile, first, self.of_weights.dtype)
        return codes.view(values.shape)

    def decode(self, codes: Tensor, scale: Tensor, first: int = 0) -> Tensor:
        """Return the values of codes, the rows from ``first`` on, by the scales of all tiles: float32."""
        rows = codes.flatten(0, -2).float()
        return (rows * spread(scale.reciprocal(), self.tile, rows.shape, first)).view(codes.shape)


@compiled_on_cuda
def encode_tiles(values: Tensor, tile: Tile, coding: Coding) -> Codes:
    """Return codes and scales: [A, B] any float."""
    scale = coding.scales(largest(values, tile).float())
    return Codes(encode(values, spread(scale, tile, values.shape), coding.dtype).contiguous(), scale)


@compiled_on_cuda
def _encode_rows(values: Tensor, scale: Tensor, tile: Tile, first: int, dtype: torch.dtype) -> Tensor:
    return encode(values, spread(scale, tile, values.shape, first), dtype)
