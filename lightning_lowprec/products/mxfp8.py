"""MXFP8 codes, e4m3 with a power-of-two scale per 32 values: the arithmetic of torchao's ``MXFP8Linear``.

Kernels (Blackwell) take bf16 and return bf16. torchao's CUDA kernel encodes columns where its extension is loaded; its
Triton kernel takes sizes that are multiples of 128; other matrices are transposed and encoded by torch. Emulation
multiplies dequantised codes, on any device, or adds products up as Blackwell does, where scales are a part of the sum.
Every size is a multiple of 32.

Unlike there, a weight has a scale per 32 x 32 values. Its codes are made once, from the weight and not from its values
in bf16, and serve forward and backward: the gradient of the input is that of the weight which the forward read. All
scales are rounded up, so that no value saturates (arXiv 2506.08027).
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.tensor_cores import MX_BLOCK, Emulation, accumulate
from lightning_lowprec.numerics.tiles import Tile
from lightning_lowprec.private.torchao import has_mx_extension, mx_names
from lightning_lowprec.products.arithmetic import Codes, Coding, Operand, Product, Role, Tiled

_TILE: Final = 128  # of torchao's Triton kernel
_DTYPE: Final = torch.float8_e4m3fn
_names = functools.cache(mx_names)
_has_extension = functools.cache(has_mx_extension)


@final
@dataclass(frozen=True, kw_only=True)
class MXFP8(Tiled):
    """Codes of e4m3 with a scale per 32 values, of weights per 32 x 32, rounded up to a power of two."""

    emulate: Emulation
    """Whether dequantised codes are multiplied in place of calling kernels, or which GPU's kernels are emulated."""
    tokens: ClassVar[int] = MX_BLOCK
    tile: ClassVar[Tile] = (MX_BLOCK, MX_BLOCK)
    of_weights: ClassVar[Coding] = Coding(dtype=_DTYPE, visible=True)

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand of the values in the dtype of autocast, which kernels take in bf16, or of a weight."""
        if role == "weight":
            return self.of_codes(*self.encoded(matrix)[:2])
        matrix = matrix.to(dtype)
        rounds = self.emulate is not True
        matrix = matrix.to(torch.bfloat16).contiguous() if rounds else matrix  # kernels encode bf16, contiguous
        return Operand(partial(_rows, matrix, bool(self.emulate)), partial(_columns, matrix, bool(self.emulate)))

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product; scales are a part of the kernels' sums."""
        if isinstance(b, Codes):
            b = _names().tensor(
                b.codes, _inverse(b.scale), _DTYPE, MX_BLOCK, a.orig_dtype, a.kernel_preference, None, False
            )
        if isinstance(self.emulate, str):
            sums: Tensor = accumulate(a.qdata, b.qdata, self.emulate, False, a.scale, b.scale)
            return sums.to(torch.bfloat16).to(dtype)
        return torch.mm(a, b.t()).to(dtype)


def _columns(matrix: Tensor, emulate: bool) -> Any:
    names = _names()
    if not emulate and _has_extension():
        kernel = names.columns_by_cuda
    elif not emulate and not any(size % _TILE for size in matrix.shape):
        kernel = names.columns_by_triton
    else:
        return _rows(matrix.t(), emulate)
    return names.columns(matrix, MX_BLOCK, _DTYPE, matrix.dtype, names.kernels, kernel, names.rounded_up)


def _rows(matrix: Tensor, emulate: bool) -> Any:
    names, rows = _names(), matrix.contiguous()
    preference, dim0 = names.emulated if emulate else names.kernels, names.rows_by_triton
    return names.tensor.to_mx(rows, _DTYPE, MX_BLOCK, names.rounded_up, preference, mxfp8_dim0_cast_kernel_choice=dim0)


def _inverse(scale: Tensor) -> Tensor:
    """Return reciprocals of powers of two for every row of a tile: the bits of their exponents are subtracted."""
    exponents = scale.contiguous().view(torch.int32) >> 23
    return (254 - exponents).to(torch.uint8).repeat_interleave(MX_BLOCK, 0).view(torch.float8_e8m0fnu)
