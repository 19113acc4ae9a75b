"""Gradients of half-precision parameters on their way to float32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.flat import local

_MARK: Final = "_lowprec_unscaled"  # on the gradient itself: a new gradient has none


@torch.no_grad()
def move_grads(params: Sequence[Tensor], masters: Sequence[Tensor], inv_scale: float | Tensor) -> None:
    """``master.grad += param.grad.float() * inv_scale; param.grad = None``, in a constant number of calls.

    A float32 gradient (``param.grad_dtype``) becomes the master's as it is: no copy, no memory.

    Args:
        params: any shapes, one dtype and device; those without a gradient are left out.
        masters: float32, one per parameter, loaded.
        inv_scale: multiplies in float32, where the smallest half-precision gradient divided by any loss scale exists.
    """
    pairs = [(p, m, p.grad) for p, m in zip(params, masters, strict=True) if p.grad is not None]
    for p, m, grad in pairs:
        if grad.is_sparse:
            _hand_over([p], [m], [grad.float() * inv_scale])
    half = [(p, m, g) for p, m, g in pairs if not g.is_sparse and g.dtype != torch.float32]
    whole = [(p, m, g) for p, m, g in pairs if not g.is_sparse and g.dtype == torch.float32]
    if half:
        moved = torch._foreach_mul([m for _, m, _ in half], 0.0)  # allocates; there is no multi-tensor empty_like
        torch._foreach_copy_([local(g) for g in moved], [local(grad) for _, _, grad in half])
        _scale(list(moved), inv_scale)
        _hand_over([p for p, _, _ in half], [m for _, m, _ in half], moved)
    if whole:
        grads = [grad for _, _, grad in whole]
        _scale(grads, inv_scale)
        _hand_over([p for p, _, _ in whole], [m for _, m, _ in whole], grads)


def _scale(grads: list[Tensor], inv_scale: float | Tensor) -> None:
    if isinstance(inv_scale, Tensor) or inv_scale != 1.0:
        torch._foreach_mul_(grads, inv_scale)


def _hand_over(params: Sequence[Tensor], masters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad + grad


@torch.no_grad()
def unscale_in_place(params: Iterable[Tensor], inv_scale: float | Tensor) -> None:
    """Multiply the gradients of parameters without masters, once until :func:`clear_marks` or a new gradient."""
    grads = [p.grad for p in params if p.grad is not None and not hasattr(p.grad, _MARK)]
    for grad in grads:
        setattr(grad, _MARK, True)
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, inv_scale)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(inv_scale)


def clear_marks(params: Iterable[Tensor]) -> None:
    """The gradients are used: what is accumulated into them from now on is scaled again."""
    for p in params:
        if p.grad is not None and hasattr(p.grad, _MARK):
            delattr(p.grad, _MARK)
