"""What kernels for products of float8 codes ask of their operands. An emulated product asks the same.

So a layout that a GPU refuses is refused on a CPU too. cuBLASLt, behind ``torch._scaled_mm``, multiplies [M, K] in rows
by [K, N] in columns; torch checks this, the sizes and the dtypes before it calls cuBLASLt
(aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from typing import Final

import torch
from torch import Tensor

ALIGNMENT: Final = 16
"""K and N are multiples of this number: the kernels load 16 bytes at once."""
_E5M2: Final = torch.float8_e5m2
_FLOAT8: Final = {torch.float8_e4m3fn, _E5M2}, {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}  # MI300: the latter


def check_operands(a: Tensor, b: Tensor) -> None:
    """Raise RuntimeError if a kernel would refuse to multiply ``a`` [M, K] and ``b`` [K, N], both float8."""
    (m, k), (_, n) = a.shape, b.shape
    allowed = (
        any({a.dtype, b.dtype} <= formats for formats in _FLOAT8)
        and not (a.dtype == b.dtype == _E5M2)
        and k % ALIGNMENT == n % ALIGNMENT == 0
        and a.stride(1) == 1
        and b.stride(0) == 1
        and (m < 2 or a.stride(0) >= k)
        and (n < 2 or b.stride(1) >= k)
    )
    if not allowed:
        raise _fault("[M, K] in rows by [K, N] in columns, K and N multiples of 16, one of them e4m3", a, b)


def check_grouped(left: Tensor, right: Tensor) -> None:
    """Raise RuntimeError if a kernel would refuse a grouped product: [P, A] and [E, A, C], or [A, P] and [P, C]."""
    allowed = (
        left.dtype == right.dtype == torch.float8_e4m3fn
        and left.is_contiguous()
        and right.stride(-2) == 1
        and left.shape[-1] % ALIGNMENT == right.shape[-1] % ALIGNMENT == 0
    )
    if not allowed:
        raise _fault("groups of contiguous e4m3 by e4m3 in columns, in multiples of 16", left, right)


def _fault(what: str, *operands: Tensor) -> RuntimeError:
    got = " and ".join(f"{codes.dtype} {tuple(codes.shape)} with strides {codes.stride()}" for codes in operands)
    fault = "This is a fault of lightning_lowprec: please report it."
    return RuntimeError(f"FP8 kernels multiply {what}; got {got}. {fault}")


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[*, K] -> [M, K]: flatten the leading dimensions, append rows of zeros until M is 1, 2, 3 ... times ``multiple``.

    The result may be a view of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % multiple if rows.shape[0] else multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def cut_rows(output: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [*, N]: undo :func:`pad_rows` for the output of a linear layer that was given the padded ``x``."""
    tokens = x.numel() // x.shape[-1]
    return output[:tokens].reshape(*x.shape[:-1], output.shape[-1])


def cut(product: Tensor, rows: int, columns: int) -> Tensor:
    """Return the first rows and columns of a product of filled operands."""
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()
