"""What a product is computed with: operands, and an arithmetic that encodes and multiplies them.

Low precision replaces a product ``a @ b.T`` of float matrices by a product of *codes*: small numbers that, times a
*scale*, stand for the values. A scale belongs to values that are summed together, or to the whole matrix. So it matters
along which dimension a product sums. Each of the three matrices of a layer takes part in two products, and is summed
along its rows in one of them, and along its columns in the other:

    forward       output      [M, N] = input       [M, K]  times  weight [N, K]    rows of both are summed
    grad_input    grad_input  [M, K] = grad_output [M, N]  times  weight [N, K]    rows of grad, columns of weight
    grad_weight   grad_weight [N, K] = grad_output [M, N]  times  input  [M, K]    columns of both

With one scale per matrix, or per square tile, the codes of both layouts are the same, transposed: made once, they can
serve both products. With a scale per row, or per block of a row, each layout has codes of its own.

A number format is a class with the methods of :class:`Arithmetic`, and nothing else of this package knows it: see
`scaled.py` (float8 with a scale per matrix or row), `block.py`, `int8.py` and `mxfp8.py` beside this file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import encode, largest_scale, visible_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tiles import Tile, largest, spread
from lightning_lowprec.numerics.weight_rounding import WeightRounding

Role = Literal["input", "weight", "gradient"]
Product = Literal["forward", "grad_input", "grad_weight"]


class Operand(NamedTuple):
    """A matrix [A, B] that can be encoded in both layouts. Nothing is encoded before it is asked for."""

    rows: Callable[[], Any]
    """Returns codes [A, B] for a product that sums along rows."""
    columns: Callable[[], Any]
    """Returns codes [B, A] for a product that sums along columns."""


class Arithmetic(ABC):
    """How one product is computed. Formats are frozen dataclasses: a compiler must know when two are equal."""

    tokens: ClassVar[int]
    """The number of rows of input and gradient is a multiple of this; rows of zeros are appended."""

    @abstractmethod
    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand of [A, B] float, in any layout; the format may read the values rounded to ``dtype``."""

    @abstractmethod
    def multiply(self, a: Any, b: Any, dtype: torch.dtype, product: Product) -> Tensor:
        """Return codes [M, K] times codes [N, K], summed along K: [M, N] of ``dtype``."""

    def weight_rounding(self) -> WeightRounding | None:
        """Return how weights are rounded, for exports; None: no server's format has these codes."""
        return None


class Codes(NamedTuple):
    """A matrix as codes, [A, B], contiguous, and the scale: float32, [], [A, 1], or of all tiles."""

    codes: Tensor
    scale: Tensor
    inverse: Tensor | None = None
    """The reciprocal of the scale, where a kernel has written it."""


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How a matrix becomes codes: format, a scale per row or one, and whether scales become powers of two, downward."""

    dtype: torch.dtype
    by_row: bool = False
    power_of_2: bool = False
    visible: bool = False
    """Whether scales are powers of two by which the largest value fits, NaN for inf and NaN, in place of torchao's."""

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of largest absolute values: (...) any float -> (...) float32."""
        return visible_scale(amax) if self.visible else largest_scale(amax, self.dtype, self.power_of_2)


class Transposable(Arithmetic):
    """An arithmetic with codes that serve both layouts of a matrix, which has one scale, or one per square tile."""

    tile: ClassVar[Tile | None] = None
    """Rows and columns of a tile, equal; None: one scale."""

    @abstractmethod
    def coding(self, role: Role) -> Coding | None:
        """Return what determines the codes of a role whose codes serve both layouts; None: they do not."""

    @abstractmethod
    def encoded(self, weight: Tensor) -> Codes:
        """Return a weight, [A, B], as codes that serve both layouts, with the scale, or those of all tiles."""

    @abstractmethod
    def decode(self, codes: Tensor, scale: Tensor, first: int = 0) -> Tensor:
        """Return the values of codes, the rows of a weight from ``first`` on, by the scale, or those of all tiles."""

    def both_layouts(self, weight: Tensor, hint: Tensor | None) -> tuple[Codes, Codes] | None:
        """Return a weight's codes, [A, B], and the transposed ones, [B, A], by one kernel; None: none writes both.

        ``hint``, [], is what the largest absolute value probably is.
        """
        return None

    def of_codes(self, codes: Tensor, scale: Tensor) -> Operand:
        """Return the operand of codes that exist."""
        return Operand(lambda: Codes(codes, scale), lambda: Codes(codes.t().contiguous(), scale.t()))


@dataclass(frozen=True, kw_only=True)
class Products:
    """The three products of a layer: the arithmetic of each, or None for high precision, the dtype of autocast."""

    forward: Arithmetic | None
    grad_input: Arithmetic | None
    grad_weight: Arithmetic | None
    in_by_out: bool = False
    """Whether the weight is stored as [K, N], as GPT-2's Conv1D does, and not as [N, K]. Its gradient is too."""
    saves_weight: bool = False
    """Whether the backward reads the codes of the weight that the forward made, where they serve both."""
    keeper_of_weight: ClassVar[Transposable | None]

    def without(self, products: Iterable[str]) -> "Products | None":
        """Return the same with these products in high precision; None if no other is left."""
        high: dict[str, Any] = dict.fromkeys(products)
        changed = replace(self, **high)
        return None if (changed.forward, changed.grad_input, changed.grad_weight) == (None,) * 3 else changed

    def __post_init__(self) -> None:
        """Find once whose codes of the weight outlive the forward: those of ``keeper_of_weight``, or none."""
        of_weight = self.saves_weight and serves(self.forward, self.grad_input, "weight")
        object.__setattr__(self, "keeper_of_weight", self.forward if of_weight else None)


def serves(one: Arithmetic | None, other: Arithmetic | None, role: Role) -> bool:
    """Return whether codes of a role that are made for one product serve the other."""
    coding = one.coding(role) if isinstance(one, Transposable) else None
    return coding is not None and isinstance(other, Transposable) and other.coding(role) == coding


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
        """Return the codes of some rows of a weight, from the row ``first`` on, by all tiles' scales."""
        return _encode_rows(values, scale, self.tile, first, self.of_weights.dtype)

    def decode(self, codes: Tensor, scale: Tensor, first: int = 0) -> Tensor:
        """Return the values of codes, the rows from ``first`` on, by the scales of all tiles: float32."""
        return codes.float() * spread(scale.reciprocal(), self.tile, codes.shape, first)


@compiled_on_cuda
def encode_tiles(values: Tensor, tile: Tile, coding: Coding) -> Codes:
    """Return codes and scales: [A, B] any float."""
    scale = coding.scales(largest(values, tile).float())
    return Codes(encode(values, spread(scale, tile, values.shape), coding.dtype).contiguous(), scale)


@compiled_on_cuda
def _encode_rows(values: Tensor, scale: Tensor, tile: Tile, first: int, dtype: torch.dtype) -> Tensor:
    return encode(values, spread(scale, tile, values.shape, first), dtype)
