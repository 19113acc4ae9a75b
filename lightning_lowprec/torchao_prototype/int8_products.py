"""Products of int8 codes with a scale per row of each operand, summed in int32: torchao's ``scaled_int8_mm``.

    codes = round(x * 127 / amax(row))          # [M, K] float -> [M, K] int8, [M]
    product = (codes_a @ codes_b.T) * scale_a[:, None] * scale_b[None, :]      # [M, K], [N, K] -> [M, N]

On CUDA torchao's Triton kernel multiplies and scales in float32. Elsewhere ``torch._int_mm`` multiplies, and the scales
are multiplied in the dtype of the operands, as torchao does; float16, which sums of int8 products overflow, has float32
scales. Encoding takes one compiled kernel on CUDA. Importing this module imports torchao.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.one_pass import rows_in_one_pass
from lightning_lowprec.private.torch_products import int8_product
from lightning_lowprec.private.torchao import int8_names
from lightning_lowprec.torchao_prototype.arithmetic import Arithmetic

_NAMES: Final = int8_names()
Codes = tuple[Tensor, Tensor]
"""(M, K) int8 contiguous, and (M,) scales of the dtype of the values."""


@final
class Int8(Arithmetic):
    """torchao's int8 products; see :class:`Arithmetic`.

    Args:
        stochastic: whether gradients are rounded stochastically.
    """

    def __init__(self, *, stochastic: bool) -> None:
        self.stochastic = stochastic

    def encode(self, matrix: Tensor, *, along_rows: bool, is_gradient: bool = False) -> Codes:
        """Return codes and scales; along columns, the codes are those of the transposed matrix."""
        encode: Any = _rows if along_rows else _columns
        stochastic = self.stochastic and is_gradient
        # neither within code that is being compiled, nor for the tensors of a compiler that traces
        if torch.compiler.is_compiling() or type(matrix) is not Tensor or not matrix.is_cuda:
            codes, scale = encode(matrix, stochastic)
        else:
            codes, scale = rows_in_one_pass(encode, matrix.detach().contiguous(), stochastic)
        return codes, scale

    def multiply(self, a: Codes, b: Codes, dtype: torch.dtype, *, rows_first: bool = False) -> Tensor:
        """Return the product, rounded as torchao rounds it on the device."""
        (rows, row_scale), (columns, column_scale) = a, b
        if rows.is_cuda:
            product: Tensor = _NAMES.scaled_mm(rows, columns.t(), row_scale, column_scale)
            return product
        if dtype == torch.float16:
            row_scale, column_scale = row_scale.float(), column_scale.float()
        sums = int8_product(rows, columns.t())
        scales = [row_scale.view(-1, 1), column_scale.view(1, -1)]
        first, second = scales if rows_first else scales[::-1]
        return (sums * first * second).to(dtype)


def _rows(matrix: Tensor, stochastic: bool) -> Codes:
    codes, scale = _NAMES.quantize(matrix, stochastic)
    return codes.contiguous(), scale.contiguous()


def _columns(matrix: Tensor, stochastic: bool) -> Codes:
    return _rows(matrix.t(), stochastic)
