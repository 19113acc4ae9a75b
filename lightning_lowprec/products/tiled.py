"""Weights with a scale per square tile: what every format of such weights does alike.

The codes of a weight are made once, serve forward and backward, and are what FSDP2 gathers. A format says the ``tile``
and its ``coding``: the dtype of codes, and scales from largest values.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import encode
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tiles import Tile, largest, spread
from lightning_lowprec.products.arithmetic import Operand, Role, Transposable
from lightning_lowprec.products.coded_weight import CodedWeight


class TileCoding(Protocol):
    """How tiles become codes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes."""

    def scales(self, amax: Tensor) -> Tensor:
        """Return scales of largest values: (...) float32 -> (...) float32."""


class TileCodes(NamedTuple):
    """A matrix as codes, with the scales of its tiles."""

    codes: Tensor
    """[A, B], contiguous."""
    scale: Tensor
    """[ceil(A / rows), ceil(B / columns)], float32."""


class Tiled(Transposable):
    """An arithmetic in which a weight has a scale per tile, where ``coding("weight")`` is not None."""

    tile: ClassVar[Tile]
    """Rows and columns of a tile, equal."""

    @abstractmethod
    def coding(self, role: Role) -> TileCoding | None:
        """Return the coding of weights; None for other roles."""

    def encoded(self, matrix: Tensor, role: Role) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of a weight, once; codes that FSDP2 has gathered are taken as they are."""
        if isinstance(matrix, CodedWeight):
            return matrix.codes_and_scale()
        return encode_tiles(matrix.detach(), self.tile, self.coding("weight"))  # no Parameter: one kernel on CUDA

    def of_codes(self, codes: Tensor, scale: Tensor) -> Operand:
        """Return the operand of a weight."""
        return _Weight(codes, scale)


@compiled_on_cuda
def encode_tiles(values: Tensor, tile: Tile, coding: Any) -> TileCodes:
    """Return codes and scales: [A, B] any float."""
    scale = coding.scales(largest(values, tile).float())
    return TileCodes(encode(values, spread(scale, tile, values.shape), coding.dtype).contiguous(), scale)


@compiled_on_cuda
def encode_rows(values: Tensor, scale: Tensor, tile: Tile, first: int, dtype: torch.dtype) -> Tensor:
    """Return the codes of some rows of a matrix, from the row ``first`` on, by the scales of all tiles."""
    return encode(values, spread(scale, tile, values.shape, first), dtype)


@final
class _Weight:
    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def rows(self) -> TileCodes:
        return TileCodes(self.codes, self.scale)

    def columns(self) -> TileCodes:
        return TileCodes(self.codes.t().contiguous(), self.scale.t())
