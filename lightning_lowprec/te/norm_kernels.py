"""Call Transformer Engine's kernels of norms: directly where code runs eagerly, as operations of torch in a graph.

Transformer Engine's own modules build a pipeline of operations at each call, which a compiler cannot trace. Both paths
here launch the kernels that Transformer Engine launches:

    x, w, b                = the arguments, cast to the autocast dtype
    y                      = (x - mean) * rstd * w + b        [rows, K]; float32 inside; an RMSNorm has no mean and b
    grad_x, grad_w, grad_b = from grad_y, x, mean, rstd, w
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_lowprec.private.transformer_engine import norm_kernels
from lightning_lowprec.products.transforms import refuse_second_gradient


class NormChoices(NamedTuple):
    """What the kernels of a norm take beside tensors."""

    eps: float
    centred: bool
    """Whether the weight is the difference to 1."""
    margin: int
    """Multiprocessors of the GPU that the forward leaves to other kernels."""
    backward_margin: int


def normalise(input: Tensor, weight: Tensor, bias: Tensor | None, choices: NormChoices) -> Tensor:
    """[*, K], [K], [K] or None (an RMSNorm) -> [*, K], in the autocast dtype, or in the weight's without autocast."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    if not torch.compiler.is_compiling():
        output: Tensor = _Normalise.apply(input, weight, bias, choices, dtype)  # type: ignore[no-untyped-call]
        return output
    x = input.to(dtype).reshape(-1, weight.numel())
    if bias is None:
        output, _ = rms_norm(x, weight.to(dtype), *choices)
    else:
        output, _, _ = layer_norm(x, weight.to(dtype), bias.to(dtype), *choices)
    return output.view(input.shape)


@final
class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, choices: NormChoices, dtype: torch.dtype
    ) -> Tensor:
        x = input.contiguous().to(dtype).view(-1, weight.numel())
        if bias is None:
            output, *statistics = _rms_forward(x, weight.to(dtype), choices)
        else:
            output, *statistics = _layer_forward(x, weight.to(dtype), bias.to(dtype), choices)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.choices = choices
        return output.view(input.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        refuse_second_gradient(grad_output)
        x, weight, *statistics = ctx.saved_tensors
        grad = grad_output.contiguous().to(x.dtype).view(x.shape)
        backward: Any = _rms_backward if len(statistics) == 1 else _layer_backward
        grad_x, *grads = backward(grad, x, *statistics, weight.to(x.dtype), ctx.choices)
        return grad_x.view(grad_output.shape), *grads, *(None,) * (4 - len(grads))


def _rms_forward(x: Tensor, weight: Tensor, choices: NormChoices) -> tuple[Tensor, Tensor]:
    te = norm_kernels()
    output, _, rstd = te.rms.rmsnorm_fwd(
        x, weight, choices.eps, None, None, te.dtypes[x.dtype], choices.margin, choices.centred
    )
    return output, rstd


def _rms_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, choices: NormChoices) -> Any:
    return norm_kernels().rms.rmsnorm_bwd(grad, x, rstd, weight, choices.backward_margin, choices.centred)


def _layer_forward(x: Tensor, weight: Tensor, bias: Tensor, choices: NormChoices) -> tuple[Tensor, Tensor, Tensor]:
    te = norm_kernels()
    output, mean, rstd = te.layer.layernorm_fwd(
        x, weight, bias, choices.eps, None, None, te.dtypes[x.dtype], choices.margin, choices.centred
    )
    return output, mean, rstd


def _layer_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, choices: NormChoices) -> Any:
    return norm_kernels().layer.layernorm_bwd(grad, x, mean, rstd, weight, choices.backward_margin, choices.centred)


# ---- the same as operations of torch, for code that is compiled


@torch.library.custom_op("lightning_lowprec::te_rms_norm", mutates_args=(), device_types="cuda")
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, centred: bool, margin: int, backward_margin: int
) -> tuple[Tensor, Tensor]:
    """[rows, K], [K] of one dtype -> output, and rstd [rows] in float32."""
    return _rms_forward(x.contiguous(), weight, NormChoices(eps, centred, margin, backward_margin))


@torch.library.custom_op("lightning_lowprec::te_rms_norm_backward", mutates_args=(), device_types="cuda")
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, centred: bool, margin: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    grad_x, grad_weight = _rms_backward(grad.contiguous(), x, rstd, weight, NormChoices(0.0, centred, 0, margin))
    return grad_x, grad_weight


@torch.library.custom_op("lightning_lowprec::te_layer_norm", mutates_args=(), device_types="cuda")
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, centred: bool, margin: int, backward_margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, K], [K], [K] of one dtype -> output, and mean and rstd [rows] in float32."""
    return _layer_forward(x.contiguous(), weight, bias, NormChoices(eps, centred, margin, backward_margin))


@torch.library.custom_op("lightning_lowprec::te_layer_norm_backward", mutates_args=(), device_types="cuda")
def layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, centred: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    choices = NormChoices(0.0, centred, 0, margin)
    grad_x, grad_weight, grad_bias = _layer_backward(grad.contiguous(), x, mean, rstd, weight, choices)
    return grad_x, grad_weight, grad_bias


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(len(x), dtype=torch.float32)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, *choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(len(x), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@layer_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *choices: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_, centred, _, backward_margin = inputs
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.last = centred, backward_margin


def _rms_norm_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return *rms_norm_backward(grad, *ctx.saved_tensors, *ctx.last), *(None,) * 4


def _layer_norm_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *layer_norm_backward(grad, *ctx.saved_tensors, *ctx.last), *(None,) * 4


rms_norm.register_autograd(_rms_norm_gradients, setup_context=_save)
layer_norm.register_autograd(_layer_norm_gradients, setup_context=_save)
