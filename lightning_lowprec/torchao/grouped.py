"""A grouped product whose three GEMMs run in FP8, of rows that are sorted by expert and one weight per expert.

    output       [P, N]     = rows [P, K]   @ weight [E, K, N]
    grad_rows    [P, K]     = grad [P, N]   @ weight.T [E, N, K]
    grad_weight  [E, N, K]  = grad.T [N, P] @ rows [P, K], per group

Everything is e4m3, gradients too: kernels for grouped products take no e5m2. Rows have one scale each. Weights have one
scale per row of what is multiplied, or one for the whole Parameter: then the codes are the same for both products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.conversion.gemms import Gemm
from lightning_lowprec.numerics.grouped_fp8 import (
    encode_columns,
    encode_rows,
    encode_weight,
    encode_whole,
    product,
    product_of_groups,
)
from lightning_lowprec.private.torchao import codes_of
from lightning_lowprec.products.transforms import check_backward
from lightning_lowprec.torchao.gathered_weight import GatheredWeight


@final
@dataclass(frozen=True, kw_only=True)
class GroupedRecipe:
    """How grouped products run."""

    one_scale: bool
    """Whether a stacked weight has one scale, or one for each row of what is multiplied."""
    in_bf16: tuple[Gemm, ...] = ()
    """The products that run in the dtype of the rows."""
    round_scales_to_power_of_2: bool
    """Whether scales are rounded down to powers of two."""
    emulate: bool
    """Whether FP8 is emulated."""


def grouped_matmul(
    rows: Tensor, weight: Tensor, ends: Tensor, recipe: GroupedRecipe, *, transposed: bool, keep: bool = False
) -> Tensor:
    """[P, K] -> [P, N] in the dtype of ``rows``.

    Args:
        rows: sorted by expert; the rows of each expert begin at a multiple of 16.
        weight: [E, N, K], or [E, K, N] if it is ``transposed``; K and N are multiples of 16.
        ends: [E] int32, the row behind each expert's last.
        recipe: how to multiply.
        transposed: the layout of the weight.
        keep: whether the backward reads the codes of a weight with one scale, or makes them again.
    """
    options = recipe.one_scale, recipe.round_scales_to_power_of_2, recipe.emulate, "_".join(recipe.in_bf16)
    output: Tensor = _GroupedMatmul.apply(rows, weight, ends, transposed, keep, *options)  # type: ignore[no-untyped-call]
    return output


@final
@torch.compiler.allow_in_graph  # traced by the compiler of torch 2.11, it loses its gradients
class _GroupedMatmul(torch.autograd.Function):
    """See :func:`grouped_matmul`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        keep: bool,
        one_scale: bool,
        power_of_2: bool,
        emulate: bool,
        in_bf16: str,
    ) -> Tensor:
        kept: Sequence[Tensor] = ()
        if keep and one_scale and "forward" not in in_bf16 and not isinstance(weight, GatheredWeight):
            kept = encode_whole(weight, power_of_2)
        ctx.save_for_backward(rows, weight, ends, *(kept if ctx.needs_input_grad[0] else ()))
        ctx.transposed, ctx.in_bf16 = transposed, in_bf16
        ctx.recipe = GroupedRecipe(one_scale=one_scale, round_scales_to_power_of_2=power_of_2, emulate=emulate)
        return _times(rows, weight, kept, ends, ctx.recipe, in_bf16="forward" in in_bf16, across=transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("FP8 experts")
        rows, weight, ends, *kept = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            high, across = "grad_input" in ctx.in_bf16, not ctx.transposed
            grad_rows = _times(grad, weight, kept, ends, ctx.recipe, in_bf16=high, across=across)
        if ctx.needs_input_grad[1]:
            left, right = (rows, grad) if ctx.transposed else (grad, rows)
            grad_weight = _grad_weight(left, right, ends, ctx.recipe, in_bf16="grad_weight" in ctx.in_bf16)
        return grad_rows, grad_weight, *(None,) * 7


def _times(
    rows: Tensor,
    weight: Tensor,
    kept: Sequence[Tensor],
    ends: Tensor,
    recipe: GroupedRecipe,
    *,
    in_bf16: bool,
    across: bool,
) -> Tensor:
    """[P, C], [E, A, C], or ``across`` [E, C, A] -> [P, A]."""
    if in_bf16:
        factor = weight.to(rows.dtype)
        return F.grouped_mm(rows, factor if across else factor.mT, offs=ends)
    codes, inverse = encode_rows(rows, recipe.round_scales_to_power_of_2)
    right, of_right = _factor(weight, kept, recipe, across=across)
    return product(codes, right.mT, (inverse, of_right), ends, rows.dtype, emulate=recipe.emulate)


def _grad_weight(left: Tensor, right: Tensor, ends: Tensor, recipe: GroupedRecipe, *, in_bf16: bool) -> Tensor:
    """[P, A], [P, C] -> [E, A, C]: the sum over the rows of each group."""
    if in_bf16:
        return F.grouped_mm(left.t(), right, offs=ends)
    power_of_2 = recipe.round_scales_to_power_of_2
    codes, inverse = encode_columns(left.contiguous(), ends, power_of_2)
    others, of_others = encode_columns(right.contiguous(), ends, power_of_2)
    return product_of_groups(codes, others.t(), (inverse, of_others), ends, left.dtype, emulate=recipe.emulate)


def _factor(weight: Tensor, kept: Sequence[Tensor], recipe: GroupedRecipe, *, across: bool) -> tuple[Tensor, Tensor]:
    """Return codes of a weight [E, A, C], or ``across`` of [E, C, A], and reciprocals of scales for all but the last.

    The codes are contiguous along the last dimension.
    """
    if isinstance(weight, GatheredWeight):
        codes, scale = codes_of(weight)
        kept = codes, scale.reciprocal()
    if kept:
        codes, inverse = kept
        codes = codes.mT.contiguous() if across else codes
    else:
        encode = encode_whole if recipe.one_scale else encode_weight
        codes, inverse = encode(weight.mT if across else weight, recipe.round_scales_to_power_of_2)
    return codes, inverse if inverse.dim() else inverse.expand(codes.shape[:2]).contiguous()
