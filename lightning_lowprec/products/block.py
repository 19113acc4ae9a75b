"""Float8 codes of e4m3 with a scale per block of 128: the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    input, gradient    a scale per 128 values of what a product sums: 1 x 128
    weight             a scale per 128 x 128 values: the same codes serve forward and backward
    scale = 448 / amax(block)            codes = round(values * scale)
    product = sum over blocks k of (codes_a[:, k] @ codes_b[:, k].T) / scale_a[:, k] / scale_b[:, k], in float32

So tensor cores add up 128 products, and these sums are scaled and added in float32 ("promoted"). Emulation adds 128
products up exactly, rounds their sum to float32, multiplies by the reciprocal of ``scale_a``, then of ``scale_b``, and
adds: every machine computes the same bits. With a named GPU, 128 products are added up as this GPU does.

On Hopper cuBLASLt multiplies (CUDA 12.9), elsewhere torchao's Triton kernels. The sum ends with a smaller block where
sizes are no multiples of 128; Triton's operands are filled up with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.hardware import architecture
from lightning_lowprec.numerics.formats import E4M3, decode
from lightning_lowprec.numerics.tensor_cores import Emulation, accumulate
from lightning_lowprec.numerics.tiles import Tile
from lightning_lowprec.numerics.weight_rounding import BLOCK, WeightRounding
from lightning_lowprec.private.torch import block_product
from lightning_lowprec.private.torchao import block_kernels
from lightning_lowprec.products.arithmetic import Codes, Coding, Operand, Product, Role, Tiled, encode_tiles

_SUMMED: Final = (1, BLOCK)
_CODING: Final = Coding(dtype=E4M3.dtype)


@final
@dataclass(frozen=True, kw_only=True)
class Block(Tiled):
    """Float8 codes with a scale per 128 values, or 128 x 128 values of a weight."""

    emulate: Emulation
    tokens: ClassVar[int] = 16
    tile: ClassVar[Tile] = (BLOCK, BLOCK)
    of_weights: ClassVar[Coding] = _CODING

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand."""
        if role == "weight":
            return self.of_codes(*self.encoded(matrix))
        # an input or a gradient is encoded along what a product sums
        return Operand(
            lambda: encode_tiles(matrix, _SUMMED, _CODING), lambda: encode_tiles(matrix.t(), _SUMMED, _CODING)
        )

    def weight_rounding(self) -> WeightRounding:
        """Return the rounding of weights: that of ``hf-fp8-block``."""
        return WeightRounding(scale_per="block", scale_of=_CODING.scales)

    def multiply(self, a: Codes, b: Codes, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product, [M, N] of ``dtype``."""
        inverse_a, inverse_b = a.scale.reciprocal(), b.scale.reciprocal()
        if self.emulate:
            if len(inverse_b) < len(b.codes):
                inverse_b = inverse_b.repeat_interleave(BLOCK, 0)[: len(b.codes)]
            return _promoted(a.codes, b.codes, inverse_a, inverse_b, self.emulate).to(dtype)
        inverse_a = inverse_a.t().contiguous().t()  # kernels read scales column by column
        codes_a, codes_b, of_tiles = a.codes, b.codes, len(inverse_b) < len(b.codes)
        if by_cublas(a.codes.device):  # which reads columns of tiles whose length is a multiple of 4
            filled = F.pad(inverse_b, (0, -inverse_b.shape[1] % 4)) if of_tiles else inverse_b.t()
            inverse_b = filled.contiguous().t()
        else:
            codes_a, codes_b = _filled(codes_a), _filled(codes_b)
            inverse_b = inverse_b.contiguous().t() if of_tiles else inverse_b.t().contiguous()
        product_of: Tensor = _OPERATION(codes_a, codes_b.t(), inverse_a, inverse_b, dtype, of_tiles)
        return product_of


def _by_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, of_tiles: bool) -> Tensor:
    if by_cublas(a.device):
        return block_product(a, b, scale_a, scale_b, dtype, of_tiles=of_tiles)
    by_tile, by_row = block_kernels()
    product: Tensor = (by_tile if of_tiles else by_row)(a, b, scale_a, scale_b, out_dtype=dtype)
    return product


_OPERATION: Final = torch.library.custom_op("lightning_lowprec::block_product", _by_kernel, mutates_args=())
"""One operation for compilers: torch 2.11 to 2.13 refuse to compile cuBLASLt's product of sizes that are no multiples
of 128, and what torch 2.11 makes of torchao's Triton kernels lacks ``import torch``."""


@_OPERATION.register_fake
def _shape(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, of_tiles: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def by_cublas(device: torch.device) -> bool:
    """Return whether cuBLASLt multiplies codes with a scale per block: on Hopper, from CUDA 12.9 on."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return architecture(device).key == "sm_90" and version >= (12, 9)


def _promoted(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, emulate: Emulation) -> Tensor:
    """[M, K], [N, K] codes -> [M, N] float32: blocks of 128 along K are scaled, and added in float32."""
    total = torch.zeros(len(a), len(b), device=a.device)
    for number, start in enumerate(range(0, a.shape[1], BLOCK)):
        left, right = (codes[:, start : start + BLOCK] for codes in (a, b))
        if isinstance(emulate, str):
            sums: Tensor = accumulate(left, right, emulate, True)
        else:
            sums = (decode(left).double() @ decode(right).double().t()).float()
        total = total + sums * inverse_a[:, number, None] * inverse_b[:, number]
    return total


def _filled(codes: Tensor) -> Tensor:
    missing = -codes.shape[1] % BLOCK
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


# ---- stacked experts: grouped products, each as a Linear's

# [P, A] rows times [E, C, A]   -> [P, C]       the rows of each group by its matrix
# [P, A] rows times [P, C] rows -> [E, A, C]    summed over the rows of each group
#
# The rows of each group begin at multiples of 128. So no block belongs to two groups, and all rows are encoded at once.
# The host has to know where groups end, to multiply one by one: torch (2.11 to 2.13) has no grouped product of these
# codes, and torchao 0.18 has DeepGEMM's, another package, whose groups the host reads too.


def encode_stack(weight: Tensor, how: Block) -> tuple[Tensor, Tensor]:
    """[E, A, C] any float -> codes [E, A, C], and the scales of the tiles of one expert after the other."""
    missing = -weight.shape[1] % BLOCK
    padded = F.pad(weight.detach(), (0, 0, 0, missing)) if missing else weight.detach()  # else a copy
    codes, scale = how.encoded(padded.flatten(0, 1))
    return codes.view(padded.shape)[:, : weight.shape[1]].contiguous(), scale


def grouped_block_product(rows: Tensor, stack: Sequence[Tensor], ends: Tensor, how: Block, *, across: bool) -> Tensor:
    """[P, A], [E, C, A] by :func:`encode_stack`, or ``across`` [E, A, C] -> [P, C]; ``ends``: [E] int32, on CPU."""
    codes, scale = stack
    scale = scale.view(len(codes), -1, scale.shape[1])
    if across:
        codes, scale = codes.mT.contiguous(), scale.mT.contiguous()
    left = how.operand(rows, "input", rows.dtype).rows()
    return _product(*left, codes, scale, ends, rows.dtype, str(how.emulate))  # type: ignore[no-any-return]


def block_sums(left: Tensor, right: Tensor, ends: Tensor, how: Block) -> Tensor:
    """[P, A], [P, C] -> [E, A, C]; ``ends``: [E] int32, on CPU."""
    a, b = (how.operand(rows, "input", rows.dtype).columns() for rows in (left, right))
    return _product(*a, *b, ends, left.dtype, str(how.emulate))  # type: ignore[no-any-return]


# one operation, since a compiler does not know how many rows a group has
@torch.library.custom_op("lightning_lowprec::grouped_block_product", mutates_args=())
def _product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype, emulate: str
) -> Tensor:
    how = Block(emulate=cast(Emulation, {"True": True, "False": False}.get(emulate, emulate)))
    parts, start = [], 0
    for group, end in enumerate(ends.tolist()):
        if b.dim() == 3:
            left, right = Codes(a[start:end], scale_a[start:end]), Codes(b[group], scale_b[group])
        else:
            blocks = slice(start // BLOCK, end // BLOCK)
            pairs = (a, scale_a), (b, scale_b)
            left, right = (Codes(codes[:, start:end].contiguous(), scale[:, blocks]) for codes, scale in pairs)
        parts.append(how.multiply(left, right, dtype, "forward"))
        start = end
    if b.dim() == 2:
        return torch.stack(parts)
    return torch.cat([*parts, a.new_zeros(len(a) - start, b.shape[1], dtype=dtype)])  # rows that nobody reads


@_product.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype, emulate: str) -> Tensor:
    shape = (len(a), b.shape[1]) if b.dim() == 3 else (len(ends), len(a), len(b))
    return a.new_empty(shape, dtype=dtype)
