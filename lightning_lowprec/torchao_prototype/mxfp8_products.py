"""Products of MXFP8 codes, e4m3 with a power-of-two scale per 32 values: the arithmetic of torchao's ``MXFP8Linear``.

Kernels (Blackwell) take bf16 and return bf16. torchao's CUDA kernel encodes columns where its extension is loaded; its
Triton kernel takes sizes that are multiples of 128; other matrices are transposed and encoded by torch. Emulation
multiplies dequantised codes, on any device. Importing this module imports torchao.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.private.torchao import has_mx_extension, mx_names
from lightning_lowprec.torchao_prototype.arithmetic import Arithmetic

BLOCK: Final = 32
"""Values that share a scale."""
_TILE: Final = 128  # of torchao's Triton kernel
_DTYPE: Final = torch.float8_e4m3fn
_NAMES: Final = mx_names()


@final
class MXFP8(Arithmetic):
    """torchao's MXFP8 products; see :class:`Arithmetic`. Every size is a multiple of 32.

    Args:
        emulated: multiply dequantised codes in place of calling kernels.
    """

    def __init__(self, *, emulated: bool) -> None:
        self.emulated = emulated
        self._has_extension = not emulated and has_mx_extension()

    def encode(self, matrix: Tensor, *, along_rows: bool, is_gradient: bool = False) -> Any:
        """Return torchao's tensor of codes and scales."""
        if self.emulated:
            return self._rows(matrix if along_rows else matrix.t(), _NAMES.emulated)
        matrix = matrix.to(torch.bfloat16).contiguous()
        if along_rows:
            return self._rows(matrix, _NAMES.kernels)
        if self._has_extension:
            kernel = _NAMES.columns_by_cuda
        elif not any(size % _TILE for size in matrix.shape):
            kernel = _NAMES.columns_by_triton
        else:
            return self._rows(matrix.t(), _NAMES.kernels)
        return _NAMES.columns(matrix, BLOCK, _DTYPE, matrix.dtype, _NAMES.kernels, kernel, _NAMES.rounded_up)

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, *, rows_first: bool = False) -> Tensor:
        """Return the product; scales are parts of the kernels' sums, so ``rows_first`` says nothing."""
        return torch.mm(a, b.t()).to(dtype)

    def _rows(self, matrix: Tensor, preference: Any) -> Any:
        return _NAMES.tensor.to_mx(
            matrix.contiguous(),
            _DTYPE,
            BLOCK,
            _NAMES.rounded_up,
            preference,
            mxfp8_dim0_cast_kernel_choice=_NAMES.rows_by_triton,
        )
