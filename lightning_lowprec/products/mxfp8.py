"""MXFP8 codes, e4m3 with a power-of-two scale per 32 values: the arithmetic of torchao's ``MXFP8Linear``.

Kernels (Blackwell) take bf16 and return bf16. torchao's CUDA kernel encodes columns where its extension is loaded; its
Triton kernel takes sizes that are multiples of 128; other matrices are transposed and encoded by torch. Emulation
multiplies dequantised codes, on any device, or adds products up as Blackwell does, where scales are a part of the sum.
Every size is a multiple of 32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.tensor_cores import MX_BLOCK, Emulation, accumulate
from lightning_lowprec.private.torchao import has_mx_extension, mx_names
from lightning_lowprec.products.arithmetic import Arithmetic, Operand, Product, Role

_TILE: Final = 128  # of torchao's Triton kernel
_DTYPE: Final = torch.float8_e4m3fn
_names = functools.cache(mx_names)
_has_extension = functools.cache(has_mx_extension)


@final
@dataclass(frozen=True, kw_only=True)
class MXFP8(Arithmetic):
    """Codes of e4m3 with a scale per 32 values, rounded up to a power of two."""

    emulate: Emulation
    """Whether dequantised codes are multiplied in place of calling kernels, or which GPU's kernels are emulated."""
    tokens: ClassVar[int] = MX_BLOCK

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand of the values in the dtype of autocast; kernels take bf16."""
        matrix = matrix.to(dtype)
        rounds = self.emulate is not True
        return _Values(matrix.to(torch.bfloat16).contiguous() if rounds else matrix, bool(self.emulate))

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product; scales are a part of the kernels' sums."""
        if isinstance(self.emulate, str):
            sums: Tensor = accumulate(a.qdata, b.qdata, self.emulate, False, a.scale, b.scale)
            return sums.to(torch.bfloat16).to(dtype)
        return torch.mm(a, b.t()).to(dtype)


@final
class _Values:
    """An operand; kernels encode bf16, contiguous."""

    def __init__(self, matrix: Tensor, emulate: bool) -> None:
        self.matrix, self.emulate = matrix, emulate

    def rows(self) -> Any:
        return _to_mx(self.matrix, self.emulate)

    def columns(self) -> Any:
        names, matrix = _names(), self.matrix
        if not self.emulate and _has_extension():
            kernel = names.columns_by_cuda
        elif not self.emulate and not any(size % _TILE for size in matrix.shape):
            kernel = names.columns_by_triton
        else:
            return _to_mx(matrix.t(), self.emulate)
        return names.columns(matrix, MX_BLOCK, _DTYPE, matrix.dtype, names.kernels, kernel, names.rounded_up)


def _to_mx(matrix: Tensor, emulate: bool) -> Any:
    names, rows = _names(), matrix.contiguous()
    preference, dim0 = names.emulated if emulate else names.kernels, names.rows_by_triton
    return names.tensor.to_mx(rows, _DTYPE, MX_BLOCK, names.rounded_up, preference, mxfp8_dim0_cast_kernel_choice=dim0)
