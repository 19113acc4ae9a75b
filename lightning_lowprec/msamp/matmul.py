"""The three FP8 products of a layer whose weight is kept as codes (MS-AMP, arXiv 2310.18313).

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]    e4m3 x e4m3
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]    e5m2 x e4m3
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]    e5m2 x e4m3

FP8 kernels read the first operand row by row and the second column by column. The three products of a layer so need the
codes of input, weight and gradient in both layouts. On CUDA one kernel computes the scale, and one kernel writes the
codes in every layout that a product will read: compiled with the block around the layer where the block is compiled,
and compiled by themselves elsewhere.

A weight that is stored as [K, N] (``in_by_out``) takes part in the same products, in the other layout of its codes, and
its gradient is computed as ``input.T @ grad_output``, [K, M] @ [M, N] -> [K, N].

Between forward and backward a layer keeps the codes of the input, one byte per element, in the layout of the backward.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import required_state_of
from lightning_lowprec.msamp.weight_state import encode
from lightning_lowprec.numerics.formats import E4M3, E5M2, Format
from lightning_lowprec.numerics.kernel_operands import check_operands
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.scaling import saturating_cast
from lightning_lowprec.private.torch import scaled_mm
from lightning_lowprec.products.transforms import check_backward


@final
@torch.compiler.allow_in_graph
class ScaledMatmul(torch.autograd.Function):
    """[M, K] @ [K, N] -> [M, N], for rows of any float and a weight of codes, [N, K] or [K, N].

    Compilers of graphs take the call as it is: autograd, not dynamo, finds the codes inside of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, emulate: bool, float32_gradient: bool, in_by_out: bool
    ) -> Tensor:
        """Multiply, and keep for the backward what the gradients that are wanted need."""
        state = required_state_of(weight)
        codes, columns, scale = _input_codes(rows, True, ctx.needs_input_grad[1])
        if state.codes.dtype == E4M3.dtype:
            weight_codes, weight_scale = state.codes, state.scale
            weight_codes = _columns(weight_codes) if in_by_out else weight_codes.contiguous()
        else:
            weight_codes, weight_scale = _weight_codes(state.codes, state.scale, in_by_out)
        # the stored codes are saved, so autograd notices when a step changes them before this backward
        ctx.save_for_backward(columns, scale, state.codes, state.scale, weight_scale)
        ctx.dtype, ctx.options = rows.dtype, (emulate, float32_gradient, in_by_out)
        second = weight_codes if in_by_out else weight_codes.t()
        return _multiply(codes, second, scale, weight_scale, rows.dtype, emulate)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows and weight that are wanted."""
        check_backward("ScaledLinear (MS-AMP)")
        codes, scale, stored, stored_scale, weight_scale = ctx.saved_tensors
        to_input, to_weight, *_ = ctx.needs_input_grad
        emulate, float32_gradient, in_by_out = ctx.options
        rows, columns, grad_scale = _grad_codes(grad_output, to_input, to_weight)
        grad_input = grad_weight = None
        if to_input:
            if in_by_out:
                weight = _weight_rows(stored, stored_scale, weight_scale).t()
            else:
                weight = _weight_columns(stored, stored_scale, weight_scale)
            grad_input = _multiply(rows, weight, grad_scale, weight_scale, ctx.dtype, emulate)
        if to_weight:
            if in_by_out:
                grad_weight = _multiply(codes.t(), columns, scale, grad_scale, torch.float32, emulate)
            else:
                grad_weight = _multiply(columns.t(), codes, grad_scale, scale, torch.float32, emulate)
            if not float32_gradient:
                grad_weight = ScaledGradient.of(grad_weight)
        return grad_input, grad_weight, None, None, None


# ---- codes: [rows, columns] any float -> codes row by row or None, the same codes column by column or None, scale


@compiled_on_cuda
def _input_codes(values: Tensor, rows: bool, columns: bool) -> tuple[Any, Any, Tensor]:
    return _both(values, E4M3, rows, columns)


@compiled_on_cuda
def _grad_codes(values: Tensor, rows: bool, columns: bool) -> tuple[Any, Any, Tensor]:
    return _both(values, E5M2, rows, columns)


def _both(values: Tensor, format: Format, rows: bool, columns: bool) -> tuple[Any, Any, Tensor]:
    codes, scale = encode(values.float(), format)
    return codes.contiguous() if rows else None, _by_column(codes) if columns else None, scale


@compiled_on_cuda
def _weight_codes(stored: Tensor, scale: Tensor, by_column: bool) -> tuple[Tensor, Tensor]:
    """Round float16 codes of a weight to e4m3 codes, and return the scale of the e4m3 codes."""
    codes, new_scale = encode(stored.float() / scale, E4M3)
    return _by_column(codes) if by_column else codes.contiguous(), new_scale


@compiled_on_cuda
def _weight_columns(stored: Tensor, stored_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the e4m3 codes of a weight column by column, for a ``scale`` that the forward has found."""
    return _by_column(_codes_by(stored, stored_scale, scale))


@compiled_on_cuda
def _weight_rows(stored: Tensor, stored_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the e4m3 codes of a weight row by row, for a ``scale`` that the forward has found."""
    return _codes_by(stored, stored_scale, scale).contiguous()


@compiled_on_cuda
def _columns(codes: Tensor) -> Tensor:
    return _by_column(codes)


def _codes_by(stored: Tensor, stored_scale: Tensor, scale: Tensor) -> Tensor:
    return stored if stored.dtype == E4M3.dtype else saturating_cast(stored.float() / stored_scale * scale, E4M3)


def _by_column(codes: Tensor) -> Tensor:
    return codes.t().contiguous().t()


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, emulate: bool) -> Tensor:
    """Multiply codes [m, k] @ codes [k, n] and divide by their scales: -> [m, n] of ``dtype``.

    ``a`` lies row by row and ``b`` column by column.
    """
    if emulate:
        check_operands(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a.float(), b.float()).mul_((a_scale * b_scale).reciprocal()).to(dtype)
    product: Tensor = scaled_mm(a, b, a_scale.reciprocal(), b_scale.reciprocal(), out_dtype=dtype)
    return product
