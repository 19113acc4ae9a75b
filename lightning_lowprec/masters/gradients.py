"""Move gradients of half-precision parameters to float32 masters, and unscale gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.flat import local
from lightning_lowprec.private.torch import copy_all_, multiply_all, multiply_all_

_UNSCALED: Final = "_lowprec_unscaled"  # an attribute of the gradient itself, so a new gradient does not have it


@torch.no_grad()
def move_grads(params: Sequence[Tensor], masters: Sequence[Tensor], inv_scale: float | Tensor) -> None:
    """``master.grad += param.grad.float() * inv_scale; param.grad = None``, in a constant number of calls.

    A dense float32 gradient (``param.grad_dtype``) is handed over to the master without a copy.

    Args:
        params: any shapes, one dtype and device; parameters without a gradient are left out.
        masters: float32, one per parameter, loaded.
        inv_scale: multiplies in float32: a half-precision gradient divided by a loss scale may be too small for half.
    """
    found = [(p, m, p.grad) for p, m in zip(params, masters, strict=True) if p.grad is not None]
    half = [(m, grad) for _, m, grad in found if grad.dtype != torch.float32 and not grad.is_sparse]
    copies = multiply_all([m for m, _ in half], 0.0)  # allocates; torch has no multi-tensor empty_like
    copy_all_([local(copy) for copy in copies], [local(grad) for _, grad in half])
    copy_of = {id(m): copy for (m, _), copy in zip(half, copies, strict=True)}
    grads = [copy_of.get(id(m), grad).float() for _, m, grad in found]
    for p, _, _ in found:
        p.grad = None
    _multiply(grads, inv_scale)
    for (_, master, _), grad in zip(found, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad + grad


@torch.no_grad()
def unscale_in_place(params: Iterable[Tensor], inv_scale: float | Tensor) -> None:
    """Multiply the gradients of parameters without masters, once until :func:`clear_marks` or a new gradient."""
    if _is_one(inv_scale):
        return
    grads = [p.grad for p in params if p.grad is not None and not hasattr(p.grad, _UNSCALED)]
    for grad in grads:
        setattr(grad, _UNSCALED, True)
    _multiply(grads, inv_scale)


def clear_marks(params: Iterable[Tensor]) -> None:
    """Forget that gradients were unscaled: a later backward adds scaled gradients to them."""
    for p in params:
        if p.grad is not None and hasattr(p.grad, _UNSCALED):
            delattr(p.grad, _UNSCALED)


def _multiply(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    if _is_one(factor):
        return
    multiply_all_([grad for grad in grads if not grad.is_sparse], factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


def _is_one(factor: float | Tensor) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0  # a tensor's value is not read: that waits for the GPU
