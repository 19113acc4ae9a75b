"""The three GEMMs of a Linear in FP8, which keep float8 codes of the input for the backward.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Forward and weight gradient multiply by the same codes of the input, in two layouts: one scale per tensor. So the codes
of the forward are kept, 1 byte per element, and the backward transposes them. Results are those of
:mod:`~lightning_lowprec.torchao.coded` and of torchao, bit for bit.

A layer whose weight does not train keeps nothing of its input.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowprec.numerics.encode import DTYPE
from lightning_lowprec.torchao.coded import encoded, gradient_of_weight, product, scale_of, transposed, weight_codes
from lightning_lowprec.torchao.shared_input import Codes, Entry, codes_of, forget


@final
@torch.compiler.allow_in_graph
class _Matmul(torch.autograd.Function):
    """[*, K] @ [K, N] -> [*, N] in the dtype of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        codes: Tensor | None,
        scale: Tensor | None,
        keep: bool,
        gradients: torch.dtype,
        power_of_2: bool,
        emulate: bool,
        entry: weakref.ref[Entry] | None,
        in_by_out: bool,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            input: [*, K] bf16, fp16 or float32; the product of * is a multiple of 16.
            weight: [N, K], or [K, N] with ``in_by_out``; float, or gathered by FSDP2 as float8.
            codes: of the input, [M, K]; None: encode here.
            scale: [] float32, of these codes.
            keep: whether the backward reads the codes of the weight that the forward made, or makes them again.
            gradients: the float8 format of gradients.
            power_of_2: whether scales are rounded down to powers of two.
            emulate: whether products are computed from decoded values.
            entry: what keeps ``codes`` for the next layer.
            in_by_out: the layout of the weight and of its gradient.
        """
        if codes is None or scale is None:
            codes, scale = _encode(input, power_of_2)
        ctx.options = gradients, power_of_2, emulate, entry, in_by_out
        used = (codes, scale) if ctx.needs_input_grad[1] else (None, None)
        of_weight = w_codes, w_scale = weight_codes(weight, power_of_2)
        kept = of_weight if keep else (weight, None)
        ctx.save_for_backward(*used, *(kept if ctx.needs_input_grad[0] else (None, None)))
        ctx.keep = keep
        rows = w_codes.t().contiguous() if in_by_out else w_codes
        out = product(codes, rows.t(), scale, w_scale, input.dtype, emulate, fast=True)
        return out.view(*input.shape[:-1], out.shape[-1]).data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight, each in the dtype of ``grad_output``.

        Raises:
            RuntimeError: the gradients will be differentiated.
        """
        if torch.is_grad_enabled():
            check_values_are_kept(None)
        codes, scale, *of_weight = ctx.saved_tensors
        gradients, power_of_2, emulate, entry, in_by_out = ctx.options
        grad_input = grad_weight = None
        g = grad_output.reshape(-1, grad_output.shape[-1])
        g_scale = scale_of(g, gradients, power_of_2)
        if ctx.needs_input_grad[0]:
            w_codes, w_scale = of_weight if ctx.keep else weight_codes(of_weight[0], power_of_2)
            columns = w_codes if in_by_out else w_codes.t().contiguous()
            g_codes = encoded(g, g_scale, gradients)
            grad_input = product(g_codes, columns.t(), g_scale, w_scale, g.dtype, emulate)
            grad_input = grad_input.view(*grad_output.shape[:-1], columns.shape[0])
        if ctx.needs_input_grad[1]:
            g_columns = transposed(g, g_scale, gradients)
            x_columns = codes.t().contiguous()
            grad_weight = gradient_of_weight((g_columns, g_scale), (x_columns, scale), g.dtype, emulate, in_by_out)
        if entry is not None:
            forget(entry)
        return grad_input, grad_weight, *(None,) * 8


def matmul(
    input: Tensor,
    rows: Tensor,
    weight: Tensor,
    *,
    keep: bool,
    gradients: torch.dtype,
    power_of_2: bool,
    emulate: bool,
    in_by_out: bool,
) -> Tensor:
    """[*, K] @ [K, N] -> [*, N] in the dtype of ``rows``.

    Args:
        input: what the layer was called with: layers that are called with one tensor share its codes.
        rows: the input in the dtype of autocast, padded, [*, K]; the product of * is a multiple of 16.
        weight: [N, K], or [K, N] with ``in_by_out``; float, or gathered by FSDP2 as float8.
        keep: whether the backward reads the codes of the weight that the forward made, or makes them again.
        gradients: the float8 format of gradients.
        power_of_2: whether scales are rounded down to powers of two.
        emulate: whether products are computed from decoded values.
        in_by_out: the layout of the weight and of its gradient.

    Raises:
        RuntimeError: ``weight`` is cut by tensor parallelism; in the backward, if the gradients will be differentiated.
    """
    if isinstance(weight, DTensor):
        raise RuntimeError(
            "`saved_inputs='codes'` does not run with tensor parallelism, which cuts the weight (got a DTensor of shape"
            f" {tuple(weight.shape)}). Use `FP8TorchAO(saved_inputs='values')`."
        )
    codes = scale = entry = None
    if not torch.compiler.is_compiling():
        how = rows.dtype, power_of_2
        codes, scale, entry = codes_of(input, how, lambda: _encode(rows, power_of_2))
    out: Tensor = _Matmul.apply(  # type: ignore[no-untyped-call]
        rows, weight, codes, scale, keep, gradients, power_of_2, emulate, entry, in_by_out
    )
    return out


def input_codes(input: Tensor, rows: Tensor, power_of_2: bool) -> Codes:
    """Return the codes of an input, which layers that are called with one tensor share.

    Args:
        input: the tensor that the layer was called with.
        rows: the input in the dtype of autocast, padded, [*, K].
        power_of_2: whether scales are rounded down to powers of two.
    """
    if torch.compiler.is_compiling():
        return _encode(rows, power_of_2)
    codes, scale, _ = codes_of(input, (rows.dtype, power_of_2), lambda: _encode(rows, power_of_2))
    return codes, scale


def check_values_are_kept(input: Tensor | None) -> None:
    """Raise RuntimeError in a backward that will be differentiated, if only the codes of the input were kept."""
    if input is None:
        raise RuntimeError(
            "`create_graph=True` needs the values of the inputs, and `saved_inputs='codes'` has kept their float8"
            " codes only. Use `FP8TorchAO(saved_inputs='values')`."
        )


@torch.no_grad()
def _encode(input: Tensor, power_of_2: bool) -> Codes:
    x = input.reshape(-1, input.shape[-1])
    scale = scale_of(x, DTYPE, power_of_2)
    return encoded(x, scale, DTYPE), scale
