"""The three GEMMs of a Linear in FP8 with one scale per tensor: every operand is measured and encoded once per forward.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Formulas, formats and flags are torchao's for one scale per tensor: the results are its results, bit for bit. torchao
encodes a weight in the forward and again in the backward; here the backward reads the codes of the forward, 1 byte per
parameter. No codes outlive the backward: a forward computes with the weight as it is, whoever wrote it. Codes of an
input that several layers share are written once when the layers are compiled together: see :func:`_stored`.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from lightning_lowprec.numerics.encode import DTYPE
from lightning_lowprec.numerics.kernel_operands import check_operands
from lightning_lowprec.private.torch import scaled_mm
from lightning_lowprec.private.torchao import constructor_arguments
from lightning_lowprec.torchao.gathered_weight import GatheredWeight


@final
@torch.compiler.allow_in_graph
class CodedMatmul(torch.autograd.Function):
    """[*, K] @ [K, N] -> [*, N] in the dtype of the input; a backward that is differentiated is in high precision."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        gradients: torch.dtype,
        power_of_2: bool,
        emulate: bool,
        in_by_out: bool,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            input: [*, K] bf16, fp16 or float32; the product of * is a multiple of 16.
            weight: [N, K], or [K, N] with ``in_by_out``, any float.
            gradients: the float8 format of gradients.
            power_of_2: whether scales are rounded down to powers of two.
            emulate: whether products are computed from decoded values.
            in_by_out: the layout of the weight and of its gradient.
        """
        codes, weight_scale = weight_codes(weight, power_of_2)
        # as in torch's own Linear, the weight itself is needed, and may not change, only where the input has a gradient
        kept = (weight, codes, weight_scale) if ctx.needs_input_grad[0] else (None, None, None)
        ctx.save_for_backward(input, *kept)
        ctx.options = gradients, power_of_2, emulate, in_by_out
        x = input.reshape(-1, input.shape[-1])
        scale = scale_of(x, DTYPE, power_of_2)
        rows = codes.t().contiguous() if in_by_out else codes
        out = product(encoded(x, scale, DTYPE), rows.t(), scale, weight_scale, input.dtype, emulate, fast=True)
        return out.view(*input.shape[:-1], out.shape[-1]).data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight, each in the dtype of ``grad_output``."""
        input, weight, codes, weight_scale = ctx.saved_tensors
        gradients, power_of_2, emulate, in_by_out = ctx.options
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad_input = grad_weight = None
        if torch.is_grad_enabled():  # the gradients will be differentiated
            grad_output = grad_output.to(input.dtype)
            rows, grad_rows = input.flatten(0, -2), grad_output.flatten(0, -2)
            if needs_input:
                grad_input = grad_output @ (weight.t() if in_by_out else weight).to(input.dtype)
            grad_weight = rows.t() @ grad_rows if in_by_out else grad_rows.t() @ rows
            return grad_input, grad_weight, *(None,) * 4
        g = grad_output.reshape(-1, grad_output.shape[-1])
        scale = scale_of(g, gradients, power_of_2)
        if needs_input:
            columns = codes if in_by_out else codes.t().contiguous()
            g_codes = encoded(g, scale, gradients)
            grad_input = product(g_codes, columns.t(), scale, weight_scale, g.dtype, emulate).view(input.shape)
        if needs_weight:
            x = input.reshape(-1, input.shape[-1])
            x_scale = scale_of(x, DTYPE, power_of_2)
            g_columns, x_columns = transposed(g, scale, gradients), transposed(x, x_scale, DTYPE)
            grad_weight = gradient_of_weight((g_columns, scale), (x_columns, x_scale), g.dtype, emulate, in_by_out)
        return grad_input, grad_weight, *(None,) * 4


def weight_codes(weight: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of a weight, in its layout, and their scale, [] float32."""
    if isinstance(weight, GatheredWeight):
        codes, scale, *_ = constructor_arguments(weight)
        return codes, scale
    scale = scale_of(weight, DTYPE, power_of_2)
    return encoded(weight, scale, DTYPE), scale


def gradient_of_weight(
    grad: tuple[Tensor, Tensor], input: tuple[Tensor, Tensor], dtype: torch.dtype, emulate: bool, in_by_out: bool
) -> Tensor:
    """Codes [N, M] and [K, M], each with its scale -> [N, K] of ``dtype``, or [K, N] with ``in_by_out``."""
    (a, a_scale), (b, b_scale) = (input, grad) if in_by_out else (grad, input)
    return product(a, b.t(), a_scale, b_scale, dtype, emulate)


def scale_of(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """Return the scale, [] float32, by which ``x`` is multiplied before it is rounded to ``dtype``."""
    scale: Tensor = amax_to_scale(tensor_to_amax(x), dtype, power_of_2)
    return scale


def encoded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K] in any layout -> codes, [M, K] of ``dtype``, contiguous."""
    limit = torch.finfo(dtype).max
    return _stored((x.float() * scale).clamp(-limit, limit).to(dtype).contiguous())


def transposed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K] -> codes, [K, M] of ``dtype``, contiguous."""
    limit = torch.finfo(dtype).max
    return _stored((x.float() * scale).clamp(-limit, limit).to(dtype).t().contiguous())


def _stored(codes: Tensor) -> Tensor:
    """Return codes that inductor writes once and reads in several products; without a view it writes them for each."""
    return codes.as_strided(codes.shape, codes.stride())


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, emulate: bool, *, fast: bool = False
) -> Tensor:
    """[M, K] float8 row-major @ [K, N] float8 column-major -> [M, N] of ``dtype``."""
    out: Tensor
    if emulate:
        check_operands(a, b)
        with torch.autocast(a.device.type, enabled=False):
            out = torch.mm(a.float() / a_scale, b.float() / b_scale).to(dtype)
    else:
        inverse = a_scale.reciprocal(), b_scale.reciprocal()
        out = scaled_mm(a, b, scale_a=inverse[0], scale_b=inverse[1], out_dtype=dtype, use_fast_accum=fast)
    return out
