"""Int8 codes with a scale per row of each operand, summed in int32: torchao's ``scaled_int8_mm``.

    codes = round(values * 127 / amax(row))                                  # [M, K] float -> [M, K] int8, [M]
    product = (codes_a @ codes_b.T) * scale_a[:, None] * scale_b[None, :]    # [M, K], [N, K] -> [M, N]

On CUDA torchao's Triton kernel multiplies and scales in float32. Elsewhere ``torch._int_mm`` multiplies, and the scales
are multiplied in the dtype of the operands, as torchao does; float16, which sums of int8 products overflow, has float32
scales. Encoding takes one compiled kernel on CUDA.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.one_pass import rows_in_one_pass
from lightning_lowprec.private.torch import int8_product
from lightning_lowprec.private.torchao import int8_names
from lightning_lowprec.products.arithmetic import Arithmetic, Operand, Product, Role

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
_names = functools.cache(int8_names)


class _OfRole(NamedTuple):
    """A matrix as codes, and its role, which decides the order of roundings."""

    codes: Tensor
    """[A, B] int8, contiguous."""
    scale: Tensor
    """[A], of the dtype of the values."""
    role: Role


@final
@dataclass(frozen=True, kw_only=True)
class Int8(Arithmetic):
    """Int8 codes with a scale per row of what is multiplied."""

    tokens: ClassVar[int] = 32

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand of the values in the dtype of autocast."""
        values = matrix.to(dtype)
        return Operand(partial(_encoded, _rows, values, role), partial(_encoded, _columns, values, role))

    def multiply(self, a: _OfRole, b: _OfRole, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product, rounded as torchao rounds it on the device."""
        if a.codes.is_cuda:
            _, scaled_mm = _names()
            by_kernel: Tensor = scaled_mm(a.codes, b.codes.t(), a.scale, b.scale)
            return by_kernel
        scales = a.scale.view(-1, 1), b.scale.view(1, -1)
        if dtype == torch.float16:
            scales = scales[0].float(), scales[1].float()
        # each multiplication rounds; in torchao's order the weight comes first, and the gradient before the input
        first, second = scales if product == "grad_weight" and a.role == "gradient" else scales[::-1]
        return (int8_product(a.codes, b.codes.t()) * first * second).to(dtype)


def _encoded(encode: Encode, matrix: Tensor, role: Role) -> _OfRole:
    # neither within code that is being compiled, nor for the tensors of a compiler that traces
    if torch.compiler.is_compiling() or type(matrix) is not Tensor or not matrix.is_cuda:
        codes, scale = encode(matrix)
    else:
        codes, scale = rows_in_one_pass(encode, matrix.detach().contiguous())
    return _OfRole(codes, scale, role)


def _rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    quantize, _ = _names()
    codes, scale = quantize(matrix)
    return codes.contiguous(), scale.contiguous()


def _columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _rows(matrix.t())
