"""NVFP4 codes: e2m1, with an e4m3 scale per 16 values and one float32 scale per matrix (arXiv 2509.25149).

    unit    = amax(matrix) / (6 * 448)          # so that the largest scale is the largest e4m3
    scale   = e4m3(amax(block) / 6 / unit)      # of 16 values in a row; of a weight, of 16 x 16
    codes   = e2m1(values / (scale * unit))     # 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign
    product = sum(codes_a * scale_a * codes_b * scale_b) * unit_a * unit_b

Tiles of 16 x 16 give a weight the same codes in both products that read it. The weight gradient sums along tokens, and
both of its operands are multiplied with a Hadamard matrix of random signs first, 16 tokens at a time: the matrix times
its transpose is 1, so that the product stays, and a large value is spread over 16. Gradients are rounded
stochastically: the mean of their codes is the gradient.

Kernels (Blackwell) multiply codes of this file by ``torch._scaled_mm``. Emulation multiplies decoded codes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.one_pass import compiled_on_cuda, rows_in_one_pass
from lightning_lowprec.numerics.tiles import Tile, largest, spread
from lightning_lowprec.private.torch_products import fp4_product
from lightning_lowprec.products.arithmetic import Operand, Product, Role
from lightning_lowprec.products.tiled import Tiled

Reference = Literal["transformer_engine", "torchao"]
"""Whose order of float32 operations scales follow: their last bits decide ties, and torchao has no subnormal scales."""
BLOCK: Final = 16
"""Codes that share a scale, and tokens that the Hadamard matrix mixes."""
_E2M1_MAX: Final = 6.0
_E4M3_DTYPE: Final = torch.float8_e4m3fn
_E4M3: Final = torch.finfo(_E4M3_DTYPE)
_LARGEST: Final = _E2M1_MAX * _E4M3.max
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_NEGATIVE: Final = 0b1101_0111_1110_1000
"""The rows of the Hadamard matrix whose sign is changed, from the lowest bit: the signs of Transformer Engine."""


class Codes(NamedTuple):
    """A matrix [A, B], encoded along B."""

    codes: Tensor
    """[A, B / 2] uint8, the code of the first of two values in the lower four bits."""
    scale: Tensor
    """[A, B / 16] float8_e4m3fn."""
    amax: Tensor
    """[] float32: of the whole matrix."""

    def decoded(self) -> Tensor:
        """Return codes times scales, exact: [A, B] float32. Their unit is ``amax / 2688``."""
        bits = _apart(self.codes).float()
        size = bits % 8
        size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
        values = torch.where(bits < 8, size, -size).view(*self.scale.shape, BLOCK)
        return (values * self.scale.float().unsqueeze(-1)).flatten(1)


@final
@dataclass(frozen=True, kw_only=True)
class NVFP4(Tiled):
    """Codes of e2m1 with a scale per 16 values, of weights per 16 x 16."""

    emulate: bool
    """Whether decoded codes are multiplied in place of calling kernels."""
    hadamard: bool = True
    """Whether the operands of the weight gradient are transformed."""
    stochastic: bool = True
    """Whether gradients are rounded stochastically."""
    reference: Reference = "transformer_engine"
    tokens: ClassVar[int] = 32
    tile: ClassVar[Tile] = (BLOCK, BLOCK)
    dtype: ClassVar[torch.dtype] = torch.uint8

    def coding(self, role: Role) -> NVFP4 | None:
        """Return the coding of weights."""
        return self if role == "weight" else None

    @staticmethod
    def scales(amax: Tensor) -> Tensor:
        """Return the largest values of all tiles, which all scales follow from, in bf16 as the values."""
        return amax.to(torch.bfloat16)

    def encoded(self, matrix: Tensor, role: Role) -> tuple[Tensor, Tensor]:
        """Return the codes of a weight and the largest values of its tiles."""
        maxima = self.scales(largest(matrix.detach(), self.tile))
        return self.encode_rows(matrix.detach(), maxima, 0), maxima

    def encode_rows(self, values: Tensor, scale: Tensor, first: int) -> Tensor:
        """[A, B] any float -> [A, B / 2] uint8, of the values in bf16, which is the dtype of autocast."""
        return _encode_rows(values, scale, False, self.reference, first)[0]

    def of_codes(self, codes: Tensor, scale: Tensor) -> Operand:
        """Return the operand of codes that exist."""
        how = codes, scale, self.tile, self.reference
        return Operand(lambda: Codes(*_laid_out(*how, False)), lambda: Codes(*_laid_out(*how, True)))

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """[A, B / 2] -> [A, B] float32."""
        rows: Codes = self.of_codes(codes, scale).rows()
        return rows.decoded() * (rows.amax / _LARGEST)

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand of the values in the dtype of autocast."""
        matrix = matrix.to(dtype)
        mixes = self.hadamard and role != "weight"
        how = role == "weight", self.stochastic and role == "gradient", self.reference, 0
        return Operand(
            lambda: _encoded(matrix, *how),
            lambda: _encoded(transformed(matrix.t()) if mixes else matrix.t(), *how),
        )

    def multiply(self, a: Codes, b: Codes, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product; that of a kernel is rounded to bf16 before the units are multiplied."""
        if self.emulate:
            with torch.autocast(a.codes.device.type, enabled=False):
                sums = a.decoded() @ b.decoded().t()
        else:
            sums = fp4_product(a.codes, b.codes, a.scale, b.scale)
        return (sums.float() * (a.amax * b.amax / (_LARGEST * _LARGEST))).to(dtype)


def _encoded(rows: Tensor, *how: Any) -> Codes:
    # neither within code that is being compiled, nor for the tensors of a compiler that traces
    if torch.compiler.is_compiling() or type(rows) is not Tensor:
        return Codes(*encode(rows, *how))
    return Codes(*rows_in_one_pass(encode, rows.detach().contiguous(), *how))


def transformed(rows: Tensor) -> Tensor:
    """Return 16 values at a time times the Hadamard matrix with changed signs: [A, B] -> [A, B], in the dtype."""
    number = torch.arange(BLOCK, device=rows.device)  # the matrix is made on the device: no copy, no wait
    shared = number[:, None] & number
    shared = shared ^ shared >> 2
    odd = (shared ^ shared >> 1 ^ (_NEGATIVE >> number)[:, None]) & 1  # bits that two numbers share: an odd number?
    matrix = (0.25 - 0.5 * odd).to(rows.dtype)  # (BLOCK, BLOCK), 1 / 4 or -1 / 4
    with torch.autocast(rows.device.type, enabled=False):
        return (rows.reshape(-1, BLOCK) @ matrix).view(rows.shape)


def encode(
    rows: Tensor, tiles: bool | Tensor, stochastic: bool, reference: Reference, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """[A, B] float, B a multiple of 32 -> the fields of :class:`Codes`; with ``tiles``, A is a multiple of 16.

    Or ``tiles`` are the largest values of all tiles of a matrix, in the dtype that is encoded, and ``rows`` a part of
    the matrix from the row ``first`` on.
    """
    values = rows.to(tiles.dtype) if isinstance(tiles, Tensor) else rows
    blocks = values.float().view(rows.shape[0], -1, BLOCK)
    maxima = blocks.abs().amax(2)  # [A, B / 16]
    amax = maxima.amax()
    if isinstance(tiles, Tensor):
        maxima, amax = spread(tiles.float(), (BLOCK, 1), maxima.shape, first), tiles.float().amax()
    elif tiles:
        maxima = maxima.view(-1, BLOCK, maxima.shape[1]).amax(1).repeat_interleave(BLOCK, 0)
    scale, factor = _scales(maxima, amax, reference)
    # each half of a byte has its own chain of operations, so that compiled code writes nothing between values and codes
    halves = (blocks[..., half::2] * factor.unsqueeze(2) for half in range(2))
    low, high = (_rounded(values.clamp(-_E2M1_MAX, _E2M1_MAX), stochastic) for values in halves)
    # kernels read rows; of a transposed matrix, compiled code would write columns
    return (low | high << 4).flatten(1).contiguous(), scale.contiguous(), amax


def _rounded(values: Tensor, stochastic: bool) -> Tensor:
    """Return the codes of values within the range of e2m1: (...) float32 -> (...) uint8."""
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # between neighbours of e2m1
    steps = size / step
    low = steps.floor()
    steps = low + (torch.rand_like(steps) < steps - low) if stochastic else steps.round()
    return (steps + torch.where(size < 2, 0, torch.where(size < 4, 2, 4)) + 8 * (values < 0)).to(torch.uint8)


_encode_rows: Final = compiled_on_cuda(encode)


def _apart(codes: Tensor) -> Tensor:
    """[A, B / 2] -> [A, B]: a code in each byte."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


@compiled_on_cuda
def _laid_out(codes: Tensor, maxima: Tensor, tile: Tile, reference: Reference, across: bool) -> tuple[Tensor, ...]:
    """Return the fields of :class:`Codes` from codes and the largest values of tiles; ``across``: of the transpose."""
    if across:
        apart = _apart(codes).t()
        codes, maxima = (apart[:, ::2] | apart[:, 1::2] << 4).contiguous(), maxima.t()
    amax = maxima.float().amax()
    return codes, _scales(maxima.float().repeat_interleave(tile[0], 0), amax, reference)[0].contiguous(), amax


def _scales(largest: Tensor, amax: Tensor, reference: Reference) -> tuple[Tensor, Tensor]:
    """Return scales of blocks, float8_e4m3fn, and what values are multiplied with, float32, both [A, B / 16]."""
    if reference == "transformer_engine":
        per_unit = torch.div(_LARGEST, amax).clamp(max=_FLOAT32_MAX)  # not `_LARGEST / amax`, which rounds twice
        per_unit = torch.where(per_unit == 0, 1.0, per_unit)  # amax is inf
        scale = (largest * (per_unit * (1 / _E2M1_MAX))).clamp(max=_E4M3.max).to(_E4M3_DTYPE)
        return scale, (1 / (scale.float() * (1 / per_unit))).clamp(max=_FLOAT32_MAX)
    unit = torch.where(amax == 0, 1.0, amax / _LARGEST)
    scale = (largest / _E2M1_MAX / unit).clamp(_E4M3.tiny, _E4M3.max).to(_E4M3_DTYPE)
    return scale, 1 / unit / scale.float()
