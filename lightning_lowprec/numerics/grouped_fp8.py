"""Grouped products of float8_e4m3fn codes, with a scale for each row of what is multiplied.

    output       [P, N]     = rows [P, K]    @ weight [E, K, N]     one scale per row, and per expert and column
    grad_rows    [P, K]     = grad [P, N]    @ weight.T [E, N, K]   the same
    grad_weight  [E, N, K]  = grad.T [N, P]  @ rows [P, K]          one scale per expert and row, expert and column

All operands lie in memory along the dimension that is summed, as Hopper's kernels need.

The scale is torchao's, ``448 / max(largest absolute value, 1e-12)``, with ``power_of_2`` rounded down to a power of
two. Its reciprocal is returned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics import tensor_cores
from lightning_lowprec.numerics.formats import E4M3, decode, encode, largest_scale
from lightning_lowprec.numerics.kernel_operands import check_grouped
from lightning_lowprec.numerics.one_pass import (
    compiled_on_cuda,
    compiles,
    is_simulated,
    kernels_run,
    on_device,
    rows_in_one_pass,
)
from lightning_lowprec.private.torch import scaled_grouped_mm

DEVICES = {"cuda"}


def encode_rows(rows: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(P, C) any float -> codes (P, C), and the reciprocals of the scales, (P,) float32."""
    traced = torch.compiler.is_compiling() or type(rows) is not Tensor  # the tensors of a compiler
    eager = traced or not rows.numel() or not compiles(rows.device)
    codes, inverse = _rows(rows, power_of_2) if eager else rows_in_one_pass(_rows, rows, power_of_2)
    return codes, inverse


def encode_weight(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(E, A, C) any float -> codes (E, A, C), contiguous, and the reciprocals of the scales, (E, A) float32."""
    if weight.is_contiguous():
        codes, inverse = encode_rows(weight.view(-1, weight.shape[-1]), power_of_2)
        return codes.view(weight.shape), inverse.view(weight.shape[:-1])
    return _across(weight, power_of_2)


@compiled_on_cuda
def encode_whole(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(E, A, C) any float -> codes (E, A, C), contiguous, of one scale, and its reciprocal, () float32."""
    scale = largest_scale(weight.abs().amax(), E4M3.dtype, power_of_2)
    return encode(weight, scale, E4M3.dtype).contiguous(), scale.reciprocal()


def _rows(rows: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    scale = largest_scale(rows.abs().amax(dim=-1), E4M3.dtype, power_of_2)
    return encode(rows, scale.unsqueeze(-1), E4M3.dtype), scale.reciprocal()


@compiled_on_cuda
def _across(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    codes, inverse = _rows(weight, power_of_2)
    return codes.contiguous(), inverse


@torch.library.custom_op("lightning_lowprec::encode_columns", mutates_args=())
def encode_columns(rows: Tensor, ends: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Encode rows along the rows of each group: (P, C) any float, (E,) int32 -> codes (C, P), inverse scales (E, C).

    ``ends`` are the rows behind each group; groups begin at multiples of 16. Codes of rows behind the last group have
    no meaning. On CUDA by one kernel of ours: 5 bytes per bf16 value; torch's operations, one by one, move 51.
    """
    if rows.device.type in DEVICES and kernels_run():
        return _by_kernel(rows, ends, power_of_2)
    group = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)  # E behind the last
    amax = torch.zeros(ends.shape[0] + 1, rows.shape[1], device=rows.device)
    amax.scatter_reduce_(0, group.unsqueeze(1).expand_as(rows), rows.abs().float(), "amax")
    scale = largest_scale(amax, E4M3.dtype, power_of_2)
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
    from lightning_lowprec.numerics import kernels

    grid = (ends.shape[0], -(-width // kernels.WIDTH.value))
    bits: Tensor = codes.view(torch.uint8)
    with on_device(rows.device):
        kernels.encode_columns[grid](rows, ends, bits, inverse, count, width, POWER_OF_2=power_of_2, num_warps=4)
    return codes, inverse


# ---- products


def product(
    left: Tensor,
    right: Tensor,
    inverse: tuple[Tensor, Tensor],
    ends: Tensor,
    dtype: torch.dtype,
    *,
    emulate: tensor_cores.Emulation,
) -> Tensor:
    """Multiply the rows of each group by its matrix, or the columns of each group by its rows.

        [P, A] codes @ [E, A, C] codes -> [P, C] of ``dtype``         inverse scales [P] and [E, C] float32
        [A, P] codes @ [P, C] codes    -> [E, A, C] of ``dtype``      inverse scales [E, A] and [E, C] float32

    ``right`` is contiguous along A, or P. Kernels round to bfloat16 before the cast to ``dtype``; ``emulate``
    multiplies in float32, or as a named GPU.
    """
    if emulate:
        check_grouped(left, right)
        emulated: Tensor = emulated_product(left, right, *inverse, ends, "" if emulate is True else emulate)
        return emulated.to(dtype)
    inverse = inverse if right.dim() == 3 else (inverse[0].flatten(), inverse[1].flatten())
    return scaled_grouped_mm(left, right, *inverse, ends).to(dtype)


# a custom operation, since torch's compiler takes no grouped product of float32
@torch.library.custom_op("lightning_lowprec::grouped_product", mutates_args=())
def emulated_product(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor, on: str) -> Tensor:
    """Return the products of :func:`product` in bfloat16, summed in float32, or on a named GPU."""
    if on:
        return _on_tensor_cores(left, right, of_left, of_right, ends.tolist(), on)
    if right.dim() == 3:
        of_left, of_right = of_left.unsqueeze(1), of_right.unsqueeze(1)
    else:
        group = torch.searchsorted(ends, torch.arange(left.shape[1], device=ends.device), right=True)
        group = group.clamp(max=ends.shape[0] - 1)  # rows behind the last group are not multiplied
        of_left, of_right = of_left[group].t(), of_right[group]
    return F.grouped_mm(decode(left) * of_left, decode(right) * of_right, offs=ends).bfloat16()


@emulated_product.register_fake
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor, on: str) -> Tensor:
    groups = () if right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1], dtype=torch.bfloat16)


def _on_tensor_cores(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: list[int], on: str
) -> Tensor:
    """Multiply group by group, with fast accumulation, as the kernel does; rows behind the last group are 0."""
    by_group = right.dim() == 2
    shape = (len(ends), len(left), right.shape[1]) if by_group else (len(left), right.shape[2])
    output = left.new_zeros(shape, dtype=torch.bfloat16)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if by_group:
            a, b, inverse = left[:, start:end], right[start:end], of_left[group]
        else:
            a, b, inverse = left[start:end], right[group], of_left[start:end]
        scales = inverse.unsqueeze(1), of_right[group].unsqueeze(0)
        result = tensor_cores.scaled_product(a, b, *scales, torch.bfloat16, fast=True, on=on)
        output[group if by_group else slice(start, end)] = result
    return output
