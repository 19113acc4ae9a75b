"""The gradients of parameters that have masters: where they are between a backward and the step.

* at the masters, as float32 (:meth:`MasterGradients.move`): for code that clips or looks at float32 gradients.
* at the parameters, as the backward left them, with a factor that the step multiplies by
  (:meth:`MasterGradients.fold`): nothing is written, and no memory is needed.
  :mod:`~lightning_lowprec.masters.deferred` says when gradients may stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from lightning_lowprec.masters.stores import Store
from lightning_lowprec.numerics.parameters import grouped
from lightning_lowprec.private.torch import copy_all_, local_tensor, multiply_all_

_FOLDED: Final = "lowprec_folded"  # an attribute of a gradient that the factor is meant for: a new one does not have it
Pairs = Iterable[tuple[Tensor, Tensor]]


@final
class MasterGradients:
    """The gradients of one optimizer's parameters with masters."""

    def __init__(self) -> None:
        self.factor: float | Tensor = 1.0
        """What the gradients that stay at the parameters are to be multiplied by; a Tensor is a float32 scalar."""
        self._shown: dict[int, torch.dtype | None] = {}  # by id(parameter): `grad_dtype` before `show`

    @property
    def waits(self) -> bool:
        """Whether gradients wait to be multiplied."""
        return not is_one(self.factor)

    def fold(self, factor: float | Tensor, grads: Iterable[Tensor]) -> None:
        """Multiply ``grads``, all gradients that stay at the parameters, by ``factor`` when the step reads them."""
        self.factor = factor if is_one(self.factor) else self.factor * factor
        for grad in grads:
            setattr(grad, _FOLDED, True)

    def forget_others(self, grads: Iterable[Tensor]) -> None:
        """Make the factor that of all ``grads``, which are at the parameters now.

        ``model.zero_grad()`` and another backward may have replaced some: the others are multiplied now.
        """
        if not self.waits:
            return
        grads = list(grads)
        folded = [grad for grad in grads if hasattr(grad, _FOLDED)]
        if len(folded) < len(grads):
            multiply(folded, self.factor)
            for grad in folded:
                delattr(grad, _FOLDED)
            self.factor = 1.0

    def move(self, store: Store) -> None:
        """Move the gradients of a store's parameters to its masters, times the folded factor."""
        pairs = [(p, m) for p, m in zip(store.params, store.masters, strict=True) if p.grad is not None]
        grads = _as_float32(store, [p.grad for p, _ in pairs if p.grad is not None])
        for p, _ in pairs:
            p.grad = None
        multiply(grads, self.factor)
        for (_, master), grad in zip(pairs, grads, strict=True):
            master.grad = grad if master.grad is None else master.grad + grad

    def show(self, pairs: Pairs) -> None:
        """Make the masters' gradients the ``grad`` of the parameters too: one tensor, so that edits reach the step."""
        for p, master in pairs:
            if master.grad is not None and p.grad is None:
                self._shown[id(p)] = p.grad_dtype
                p.grad_dtype = None  # any
                p.grad = master.grad

    def hide(self, pairs: Pairs) -> None:
        """Undo :meth:`show`; a gradient that was assigned or dropped since then replaces the master's."""
        shown, self._shown = self._shown, {}
        for p, master in pairs if shown else ():
            if id(p) in shown:
                grad, p.grad = p.grad, None
                p.grad_dtype = shown[id(p)]
                master.grad = None if grad is None else grad.float()


@torch.no_grad()
def _as_float32(store: Store, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 gradients, float32 ones themselves; in few calls if every parameter has a half-precision one."""
    if len(grads) < len(store.params) or any(grad.dtype == torch.float32 or grad.is_sparse for grad in grads):
        return [grad.float() for grad in grads]
    copies = store.tensors_on(torch.empty_like(store.flat))
    copy_all_([local_tensor(copy) for copy in copies], [local_tensor(grad) for grad in grads])
    return copies


@torch.no_grad()
def multiply(grads: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place, of DTensors the shards; ``factor`` may be a scalar on another device."""
    if is_one(factor):
        return
    for members in grouped(map(local_tensor, grads), lambda grad: grad.device):
        here = factor.to(members[0].device) if isinstance(factor, Tensor) else factor
        multiply_all_([grad for grad in members if not grad.is_sparse], here)
        for grad in members:
            if grad.is_sparse:
                grad.mul_(here)


def is_one(factor: float | Tensor) -> bool:
    """Return whether nothing needs to be multiplied; the value of a tensor is not read: that waits for the GPU."""
    return not isinstance(factor, Tensor) and factor == 1.0
