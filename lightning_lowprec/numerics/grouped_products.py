"""Grouped products of float8 codes: FP8 kernels on CUDA, or their emulation by products in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.kernel_operands import check_grouped
from lightning_lowprec.private.torch_products import scaled_grouped_mm


def product(
    left: Tensor, right: Tensor, inverse: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype, *, emulate: bool
) -> Tensor:
    """Multiply the rows of each group by its matrix: [P, A] codes @ [E, A, C] codes -> [P, C] of ``dtype``.

    Args:
        left: contiguous.
        right: contiguous along A.
        inverse: reciprocals of scales, [P] and [E, C] float32.
        ends: [E] int32.
        dtype: of the result; kernels round to bfloat16 before.
        emulate: whether to multiply in float32.
    """
    if emulate:
        check_grouped(left, right)
    multiply = emulated_product if emulate else scaled_grouped_mm
    result: Tensor = multiply(left, right, *inverse, ends)
    return result.to(dtype)


def product_of_groups(
    left: Tensor, right: Tensor, inverse: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype, *, emulate: bool
) -> Tensor:
    """Multiply the columns of each group by its rows: [A, P] codes @ [P, C] codes -> [E, A, C] of ``dtype``.

    Args:
        left: contiguous.
        right: contiguous along P.
        inverse: reciprocals of scales, [E, A] and [E, C] float32.
        ends: [E] int32.
        dtype: of the result; kernels round to bfloat16 before.
        emulate: whether to multiply in float32.
    """
    if emulate:
        check_grouped(left, right)
        result: Tensor = emulated_product_of_groups(left, right, *inverse, ends)
    else:
        result = scaled_grouped_mm(left, right, inverse[0].flatten(), inverse[1].flatten(), ends)
    return result.to(dtype)


# custom operations, since torch's compiler takes no grouped product of float32


@torch.library.custom_op("lightning_lowprec::grouped_product", mutates_args=())
def emulated_product(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor) -> Tensor:
    """[P, A], [E, A, C] codes -> [P, C] bfloat16, summed in float32."""
    scaled = left.float() * of_left.unsqueeze(1), right.float() * of_right.unsqueeze(1)
    return F.grouped_mm(*scaled, offs=ends).bfloat16()


@emulated_product.register_fake
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[2], dtype=torch.bfloat16)


@torch.library.custom_op("lightning_lowprec::product_of_groups", mutates_args=())
def emulated_product_of_groups(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor) -> Tensor:
    """[A, P], [P, C] codes -> [E, A, C] bfloat16, summed in float32."""
    group = torch.searchsorted(ends, torch.arange(left.shape[1], device=ends.device), right=True)
    group = group.clamp(max=ends.shape[0] - 1)  # rows behind the last group are not multiplied
    scaled = left.float() * of_left[group].t(), right.float() * of_right[group]
    return F.grouped_mm(*scaled, offs=ends).bfloat16()


@emulated_product_of_groups.register_fake
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[1], dtype=torch.bfloat16)
