"""Matrix products of float8 codes with one power-of-two scale per matrix; FP8 kernels, or their emulation.

``torch._scaled_mm`` wants the first factor row by row and the second one column by column ("TN"), and dimensions that
are multiples of 16. So a matrix that is a factor of two products is stored twice: as codes, and as transposed codes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from lightning_lowprec.numerics.formats import E4M3, Format
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT, check_operands
from lightning_lowprec.numerics.largest import largest
from lightning_lowprec.numerics.one_pass import in_one_pass, rows_in_one_pass
from lightning_lowprec.numerics.scaling import encode, power_of_two_scale
from lightning_lowprec.numerics.weight_codes import kernel_encodes, weight_codes
from lightning_lowprec.private.torch import largest_absolute_values, scaled_mm


@final
@dataclass(frozen=True, kw_only=True)
class Codes:
    """A matrix as codes, row by row, of its transpose, and the reciprocal of their scale."""

    rows: Tensor
    """(M, N) float8, contiguous."""
    columns: Tensor
    """(N, M) float8, contiguous: the transposed codes."""
    inv_scale: Tensor
    """Scalar float32."""

    @classmethod
    def of(cls, values: Tensor, format: Format = E4M3) -> Codes:
        """Encode a matrix with the scale of its amax; rows and columns of zeros fill it up to multiples of 16.

        values: (M, N) any float; NaN and inf become NaN or the format's limits, and their scale is 1.
        """
        if isinstance(values, Parameter) and format == E4M3 and kernel_encodes(values):
            scale_of = functools.partial(power_of_two_scale, format=E4M3)
            rows, columns, scale = weight_codes(values.detach(), scale_of, largest(values))
            return cls(rows=rows, columns=columns, inv_scale=scale.reciprocal())
        (amax,) = largest_absolute_values([values])
        scale = power_of_two_scale(amax, format)
        rows = padded(in_one_pass(encode, values, scale, format.dtype))
        return cls(rows=rows, columns=transposed(rows), inv_scale=scale.reciprocal())


def padded(codes: Tensor) -> Tensor:
    """(M, N) float8 -> (M', N') float8, filled up with zeros to the next multiples of 16."""
    missing = [-size % ALIGNMENT for size in codes.shape]
    if not any(missing):
        return codes
    return F.pad(codes.view(torch.uint8), (0, missing[1], 0, missing[0])).view(codes.dtype)


def transposed(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """(M, N) float8 -> (N, M) float8, contiguous, or written into ``out``: (N, M), columns of a larger matrix."""
    if out is None:
        out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    rows_in_one_pass(_transpose_into, codes.view(torch.uint8), out.view(torch.uint8))
    return out


def _transpose_into(codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.t())


def product(
    a: Tensor, b_columns: Tensor, inv_scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, emulate: bool
) -> Tensor:
    """(M, K) @ (N, K).T -> (M, N) in ``dtype``, accumulated in float32.

    Args:
        a: codes, contiguous.
        b_columns: transposed codes of the second factor, contiguous.
        inv_scales: of the two factors, scalars float32.
        dtype: float32 or bfloat16; where FP8 is emulated, any.
        fast: whether the kernel may accumulate with fewer bits.
        emulate: multiply dequantised codes in float32.
    """
    if emulate:
        check_operands(a, b_columns.t())
        return ((a.float() @ b_columns.float().t()) * (inv_scales[0] * inv_scales[1])).to(dtype)
    made: Tensor = scaled_mm(
        a, b_columns.t(), scale_a=inv_scales[0], scale_b=inv_scales[1], out_dtype=dtype, use_fast_accum=fast
    )
    return made
