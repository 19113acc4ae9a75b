"""Encode the operands of grouped products as float8_e4m3fn, with a scale for each row of what is multiplied.

    output       [P, N]     = rows [P, K]    @ weight [E, K, N]     one scale per row, and per expert and column
    grad_rows    [P, K]     = grad [P, N]    @ weight.T [E, N, K]   the same
    grad_weight  [E, N, K]  = grad.T [N, P]  @ rows [P, K]          one scale per expert and row, expert and column

All operands lie in memory along the dimension that is summed, as Hopper's kernels need.

The scale is that of torchao, ``448 / max(largest absolute value, 1e-12)``, and what is returned is its reciprocal.
Rounded down to a power of two, a scale is exact.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.one_pass import compiled_on_cuda, compiles, rows_in_one_pass
from lightning_lowprec.numerics.scaling import encode
from lightning_lowprec.numerics.triton_runs import is_simulated, kernels_run

LEAST: Final = 1e-12
"""The lower bound of a largest absolute value, as in torchao."""
_EXPONENT: Final = 0x7F800000  # the bits of a float32 that make a power of two
DEVICES = {"cuda"}


def scales(amax: Tensor, power_of_2: bool) -> Tensor:
    """Return the scales of largest absolute values: (...) float32 -> (...) float32; NaN stays NaN."""
    scale = (E4M3.max / amax.clamp(min=LEAST).double()).float()  # in float64, so that all compilers agree
    if not power_of_2:
        return scale
    rounded = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, scale)


def encode_rows(rows: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(P, C) any float -> codes (P, C), and the reciprocals of the scales, (P,) float32."""
    traced = torch.compiler.is_compiling() or type(rows) is not Tensor  # the tensors of a compiler
    if traced or not rows.numel() or not compiles(rows.device):
        return _rows(rows, power_of_2)
    made: tuple[Tensor, Tensor] = rows_in_one_pass(_rows, rows, power_of_2)
    return made


def encode_weight(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(E, A, C) any float -> codes (E, A, C), contiguous, and the reciprocals of the scales, (E, A) float32."""
    if weight.is_contiguous():
        codes, inverse = encode_rows(weight.view(-1, weight.shape[-1]), power_of_2)
        return codes.view(weight.shape), inverse.view(weight.shape[:-1])
    made: tuple[Tensor, Tensor] = _across(weight, power_of_2)
    return made


def encode_whole(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(E, A, C) any float -> codes (E, A, C), contiguous, of one scale, and its reciprocal, () float32."""
    made: tuple[Tensor, Tensor] = _whole(weight, power_of_2)
    return made


def _rows(rows: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    scale = scales(rows.abs().amax(dim=-1).float(), power_of_2)
    return encode(rows, scale.unsqueeze(-1), E4M3.dtype), scale.reciprocal()


@compiled_on_cuda
def _across(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    codes, inverse = _rows(weight, power_of_2)
    return codes.contiguous(), inverse


@compiled_on_cuda
def _whole(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    scale = scales(weight.abs().amax().float(), power_of_2)
    return encode(weight, scale, E4M3.dtype).contiguous(), scale.reciprocal()


@torch.library.custom_op("lightning_lowprec::encode_columns", mutates_args=())
def encode_columns(rows: Tensor, ends: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Encode rows along the rows of each group: one scale per group and column.

    Args:
        rows: (P, C) any float, contiguous.
        ends: (E,) int32: the row behind each group; groups begin at multiples of 16. Codes of rows behind the last
            group have no meaning.
        power_of_2: whether scales are rounded down to powers of two.

    Returns:
        Codes (C, P), contiguous, and the reciprocals of the scales, (E, C) float32.
    """
    if rows.device.type in DEVICES and kernels_run():
        return _by_kernel(rows, ends, power_of_2)
    group = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)  # E behind the last
    amax = torch.zeros(ends.shape[0] + 1, rows.shape[1], device=rows.device)
    amax.scatter_reduce_(0, group.unsqueeze(1).expand_as(rows), rows.abs().float(), "amax")
    scale = scales(amax, power_of_2)
    return encode(rows, scale[group], E4M3.dtype).t().contiguous(), scale[:-1].reciprocal()


@encode_columns.register_fake
def _(rows: Tensor, ends: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    codes = rows.new_empty(rows.shape[1], rows.shape[0], dtype=E4M3.dtype)
    return codes, rows.new_empty(ends.shape[0], rows.shape[1], dtype=torch.float32)


def _by_kernel(rows: Tensor, ends: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    count, width = rows.shape
    codes = torch.empty(width, count, dtype=E4M3.dtype, device=rows.device)
    inverse = torch.empty(ends.shape[0], width, device=rows.device)
    if is_simulated():
        return codes, inverse
    from lightning_lowprec.numerics import encode_columns_kernel as kernel

    grid = (ends.shape[0], -(-width // kernel.WIDTH.value))
    arguments: tuple[Any, ...] = (rows, ends, codes.view(torch.uint8), inverse, count, width)
    with torch.cuda.device(rows.device) if rows.is_cuda else torch.device(rows.device):
        kernel.encode_columns[grid](*arguments, POWER_OF_2=power_of_2, num_warps=4)
    return codes, inverse
