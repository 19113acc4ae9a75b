"""The work of a Linear layer, forward and backward, in any number format: one autograd function.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Each product is computed on codes by its arithmetic (:mod:`~lightning_lowprec.products.arithmetic`), or in high
precision: operands in the dtype of autocast and the bias within the product, bit for bit as ``bf16-mixed`` computes it.

M, the number of tokens, is what ``grad_weight`` sums along, and kernels take multiples of 16 or 32 there. So rows of
zeros are appended to a batch, and cut off again: they change no largest value, and add nothing to any sum.

What lives until the backward: the input; the weight (no copy: autograd then notices a write in between); and its codes
where the backward can read them, 1 byte per parameter. Only what a wanted gradient needs.

A weight that is stored as [K, N] changes rows for columns, and its gradient is computed in its own layout, as
``input.T @ grad_output``: nothing is transposed in high precision.
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.fp8_matrices import LARGE
from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.products.arithmetic import Codes, Operand, Products, serves
from lightning_lowprec.products.coded_weight import CodedWeight
from lightning_lowprec.products.transforms import check_backward, refuse_forward_mode

SavedWeight = tuple[Tensor | None, ...]
"""A weight, its codes, their scale and its reciprocal, as far as they live until the backward."""


@final
@torch.compiler.allow_in_graph
class _Linear(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        by: Products,
        hint: Tensor | None,
    ) -> Tensor:
        ctx.by, ctx.dtype, ctx.has_bias = by, input.dtype, bias is not None
        ctx.laid_out = False
        to_input, to_weight = ctx.needs_input_grad[:2]
        of_weight: SavedWeight = (weight, None, None, None) if scale is None else (None, weight, scale, None)
        bias = None if bias is None else bias.to(input.dtype)
        if (how := by.forward) is None:
            output = in_high_precision(input, weight.to(input.dtype), bias, by.in_by_out)
        else:
            x = how.operand(pad_rows(input, how.tokens), "input", input.dtype)
            keeper = by.keeper_of_weight if scale is None and not isinstance(weight, CodedWeight) else None
            both = None
            if keeper is not None and to_input and weight.numel() >= LARGE:
                both = keeper.both_layouts(weight, hint)
            if both is not None:
                codes, kept = both[::-1] if by.in_by_out else both
                of_weight, ctx.laid_out = (weight, *kept), True
            else:
                if keeper is not None:
                    of_weight = weight, *keeper.encoded(weight)
                w = _of_weight(how, of_weight, input.dtype)
                codes = w.columns() if by.in_by_out else w.rows()
            output = how.multiply(x.rows(), codes, input.dtype, "forward")
            output = cut_rows(output if bias is None else output + bias, input)
        ctx.save_for_backward(input if to_weight else None, *(of_weight if to_input else (None,)))
        return output.data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints give a tensor only once
        input, of_weight = saved[0], saved[1:]
        weight = of_weight[0]
        to_input, to_weight, _, to_bias = ctx.needs_input_grad[:4]
        by: Products = ctx.by
        by_input, by_weight = by.grad_input, by.grad_weight
        if torch.is_grad_enabled():  # the gradients will be differentiated
            if isinstance(weight, CodedWeight):
                check_backward("FP8Linear under FSDP2", "Use 'ddp'.")
            if to_input and weight is None:
                check_backward("a frozen weight that is stored as codes", "Use `frozen='convert'`.")
            by_input = by_weight = None
        g = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_weight = grad = None
        if to_input and by_input is None:
            w = weight.to(ctx.dtype)
            grad_input = g @ (w.t() if by.in_by_out else w)
        elif to_input and by_input is not None:
            grad = by_input.operand(pad_rows(g, by_input.tokens), "gradient", g.dtype)
            if ctx.laid_out:
                codes = Codes(*of_weight[1:])
            else:
                w = _of_weight(by_input, of_weight, g.dtype)
                codes = w.rows() if by.in_by_out else w.columns()
            grad_input = by_input.multiply(grad.rows(), codes, g.dtype, "grad_input")[: g.shape[0]]
        if to_weight and by_weight is None:
            x = input.reshape(-1, input.shape[-1])
            grad_weight = x.t() @ g if by.in_by_out else g.t() @ x
        elif to_weight and by_weight is not None:
            if grad is None or not serves(by_input, by_weight, "gradient"):
                grad = by_weight.operand(pad_rows(g, by_weight.tokens), "gradient", g.dtype)
            x = by_weight.operand(pad_rows(input, by_weight.tokens), "input", ctx.dtype)
            a, b = (x, grad) if by.in_by_out else (grad, x)
            grad_weight = by_weight.multiply(a.columns(), b.columns(), g.dtype, "grad_weight")
        if grad_input is not None:
            grad_input = grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1])
        return grad_input, grad_weight, None, g.sum(0) if ctx.has_bias and to_bias else None, None, None


def linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    by: Products,
    hint: Tensor | None = None,
) -> Tensor:
    """[*, K] -> [*, N] in the dtype of ``input``, with gradients of input, weight and bias.

    ``input`` is in the dtype of autocast. The weight is [N, K], or [K, N] with ``by.in_by_out``, or codes that FSDP2
    has gathered; or, with their ``scale``, the codes of a frozen weight, which has no values. ``hint``, [], is what its
    largest absolute value probably is.
    """
    output: Tensor = _Linear.apply(input, weight, scale, bias, by, hint)  # type: ignore[no-untyped-call]
    return output


def _of_weight(how: Any, saved: SavedWeight, dtype: torch.dtype) -> Operand:
    """Return the operand of a weight, or of its codes, which were kept, or which FSDP2 has gathered."""
    weight, codes, scale, _ = saved
    if isinstance(weight, CodedWeight):
        codes, scale = weight.codes_and_scale()
    operand: Operand = how.operand(weight, "weight", dtype) if codes is None else how.of_codes(codes, scale)
    return operand


def in_high_precision(input: Tensor, weight: Tensor, bias: Tensor | None, in_by_out: bool) -> Tensor:
    """[*, K] -> [*, N], as a Linear computes it, or a Conv1D with ``in_by_out``."""
    if not in_by_out:
        return F.linear(input, weight, bias)
    x = input.reshape(-1, input.shape[-1])
    output = x @ weight if bias is None else torch.addmm(bias, x, weight)
    return output.view(*input.shape[:-1], output.shape[-1])
