"""The three matrix products of a layer, each of codes or in the autocast dtype.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Both operands are encoded along the dimension that the product sums over, at every product: the codes of one product do
not serve another. A product in the autocast dtype is that of ``bf16-mixed``, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.conversion.gemms import Gemm
from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.torchao_prototype.arithmetic import Arithmetic, Kind

TOKEN_ALIGNMENT: Final = 32
"""Tokens are padded with rows of zeros to a multiple of this: a block of MXFP8 holds 32 of them in ``grad_weight``."""


@final
@torch.compiler.allow_in_graph
class Products(torch.autograd.Function):
    """[*, K] -> [*, N] in the dtype of the input, with the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind,
        in_high: tuple[Gemm, ...],
        in_by_out: bool,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            input: [*, K] in the autocast dtype.
            weight: [N, K] float, or [K, N] with ``in_by_out``.
            bias: [N] float.
            kind: the arithmetic of the products of codes.
            in_high: the products in the dtype of the input.
            in_by_out: the layout of the weight and of its gradient.
        """
        ctx.kind, ctx.in_high, ctx.in_by_out, ctx.has_bias = kind, in_high, in_by_out, bias is not None
        ctx.save_for_backward(input, weight)
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
        if "forward" in in_high:
            return _in_high_precision(input, weight, bias, in_by_out).data
        by = arithmetic(kind)
        rows = pad_rows(input, TOKEN_ALIGNMENT)
        product = by.multiply(
            by.encode(rows, along_rows=True), by.encode(weight, along_rows=not in_by_out), input.dtype
        )
        output = cut_rows(product if bias is None else product + bias, input)
        return output.data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias; in high precision where they will be differentiated."""
        input, weight = ctx.saved_tensors
        in_high = ("grad_input", "grad_weight") if torch.is_grad_enabled() else ctx.in_high
        by, dtype, in_by_out = arithmetic(ctx.kind), input.dtype, ctx.in_by_out
        g = grad_output.reshape(-1, grad_output.shape[-1])
        padded = pad_rows(g, TOKEN_ALIGNMENT)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            w = weight.to(dtype)
            if "grad_input" in in_high:
                grad_input = g @ (w.t() if in_by_out else w)
            else:
                codes = by.encode(padded, along_rows=True, is_gradient=True)
                grad_input = by.multiply(codes, by.encode(w, along_rows=in_by_out), dtype)[: g.shape[0]]
            grad_input = grad_input.view(input.shape)
        if ctx.needs_input_grad[1]:
            x = input.reshape(-1, input.shape[-1])
            if "grad_weight" in in_high:
                grad_weight = x.t() @ g if in_by_out else g.t() @ x
            else:
                of_grad = by.encode(padded, along_rows=False, is_gradient=True)
                of_input = by.encode(pad_rows(x, TOKEN_ALIGNMENT), along_rows=False)
                a, b = (of_input, of_grad) if in_by_out else (of_grad, of_input)
                grad_weight = by.multiply(a, b, dtype, rows_first=not in_by_out)  # torchao's order: the gradient first
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = g.sum(0)
        return grad_input, grad_weight, grad_bias, None, None, None


def _in_high_precision(input: Tensor, weight: Tensor, bias: Tensor | None, in_by_out: bool) -> Tensor:
    """[*, K] -> [*, N], as a Linear computes it, or a Conv1D with ``in_by_out``."""
    if not in_by_out:
        return F.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    output = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return output.view(*input.shape[:-1], output.shape[-1])


@functools.cache
def arithmetic(kind: Kind) -> Arithmetic:
    """Return an arithmetic; this imports torchao's prototypes."""
    if kind.startswith("int8"):
        from lightning_lowprec.torchao_prototype.int8_products import Int8

        return Int8(stochastic=kind == "int8_stochastic")
    from lightning_lowprec.torchao_prototype.mxfp8_products import MXFP8

    return MXFP8(emulated=kind == "mxfp8_emulated")
