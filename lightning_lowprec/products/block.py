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

from dataclasses import dataclass
from typing import ClassVar, Final, final

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
            return self.of_codes(*self.encoded(matrix)[:2])
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
