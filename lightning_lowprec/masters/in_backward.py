"""Update a parameter during the backward pass, as soon as its gradient is complete, and free the gradient.

So there are never gradients of the whole model, and float32 values of one parameter at a time. ``optimizer.step()``
then counts the step, and updates what has a gradient all the same: parameters without masters, and gradients that other
code has assigned.

Under DDP gradients are averaged after the hooks of their parameters, so that parameters are updated in the step there:
as in the backward pass, but the gradients of the whole model exist. FSDP2 runs the hooks after its reduce-scatter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.masters.gradients import norm_of_norms
from lightning_lowprec.masters.registry import MasterRegistry
from lightning_lowprec.masters.stepped_copies import refuse_copies

LAST_NORM: Final = "last_gradient_norm"  # in param_groups[0], where state dicts and pickles carry it along
_HANDLE: Final = "lowprec_update"  # an attribute of parameters: how to remove their hook


@final
class BackwardUpdates:
    """The hooks of one optimizer's parameters.

    Args:
        optimizer: an optimizer with masters, each in a store of its own.
        registry: the masters.
        update: steps the parameter of a store, whose gradient is at the parameter, multiplied by a factor.
    """

    def __init__(self, optimizer: Optimizer, registry: MasterRegistry, update: Callable[[Tensor, Any], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._registry = weakref.ref(registry)
        self._update = update
        self._updated: set[int] = set()  # id(parameter), since the last step
        self._norms: list[Tensor] = []  # of gradients since the last step; of DTensors, not summed over the ranks
        self._config = registry.config

    def watch(self) -> None:
        """Hook the parameters that have masters; a hook of another optimizer is removed."""
        registry = self._registry()
        for param, _ in registry.pairs() if registry is not None else ():
            owner = vars(param).get(_HANDLE)
            if owner is not None and owner[0] is self:
                continue
            if owner is not None:
                owner[1].remove()
            if param.requires_grad:
                hook: Any = param.register_post_accumulate_grad_hook
                setattr(param, _HANDLE, _Owner((self, hook(self._on_gradient))))

    def forget(self) -> None:
        """Remove all hooks."""
        registry = self._registry()
        for param, _ in registry.pairs() if registry is not None else ():
            owner = vars(param).get(_HANDLE)
            if owner is not None and owner[0] is self:
                owner[1].remove()
                delattr(param, _HANDLE)

    def finish(self) -> None:
        """Begin a new step."""
        self._updated.clear()
        optimizer = self._optimizer()
        if self._norms and optimizer is not None:
            optimizer.param_groups[0][LAST_NORM] = norm_of_norms(self._norms)
        self._norms = []

    @torch.no_grad()
    def update_left(self) -> None:
        """Update the parameters that have gradients, if gradients are clipped one by one: in a step, under DDP."""
        registry = self._registry()
        if registry is None or (self._config.clip_tensor is None and self._config.clip_last_norm is None):
            return
        for param, _ in list(registry.pairs()):
            if param.grad is not None:
                self._update(param, self._factor(param))

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        if self._optimizer() is None or param.grad is None or _is_averaged_later(param):
            return
        if id(param) in self._updated:
            raise RuntimeError(
                f"a second backward pass reached a parameter of shape {tuple(param.shape)} before `optimizer.step()`,"
                " and the first one has updated it already: `update='backward'` cannot add up the gradients of several"
                " backward passes. Add the losses and run one backward pass, or use `MasterConfig(update='step')`."
            )
        self._updated.add(id(param))
        _wait_for_offload(param)
        self._update(param, self._factor(param))

    def _factor(self, param: Tensor) -> float | Tensor:
        """Return what clipping multiplies the gradient by, and note the norm of the gradient if it is needed."""
        if self._config.clip_tensor is not None:
            return _clipped(self._config.clip_tensor, norm_of_norms([_norm(param.grad)]))
        if self._config.clip_last_norm is None:
            return 1.0
        self._norms.append(_norm(param.grad))
        optimizer = self._optimizer()
        last = None if optimizer is None else optimizer.param_groups[0].get(LAST_NORM)
        if last is None:
            return 1.0
        return _clipped(self._config.clip_last_norm, last.to(param.device))


@final
class _Owner(tuple[Any, ...]):
    """What hooks a parameter; no part of its copies and pickles."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _norm(grad: Tensor | None) -> Tensor:
    """Return the norm of a gradient: a float32 scalar, of a DTensor a DTensor that is not yet summed over the ranks."""
    assert grad is not None
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
    return norm


def _wait_for_offload(param: Tensor) -> None:
    """Wait until the gradient of an offloaded shard is in CPU memory: torch 2.11 copies it while the hook runs."""
    kind = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    if kind != param.device.type:
        torch.get_device_module(kind).current_stream().synchronize()


def _clipped(largest: float, norm: Tensor) -> Tensor:
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def _is_averaged_later(param: Tensor) -> bool:
    """Return whether DDP may write the gradient after its hooks, which it does in a group of one process too."""
    return not isinstance(param, DTensor) and dist.is_available() and dist.is_initialized()


def refuse_clipping(optimizer: Optimizer) -> None:
    """Raise if gradients are gone before they could be clipped.

    Raises:
        RuntimeError: the optimizer updates parameters during the backward pass.
        TypeError: the optimizer copies gradients during the backward pass.
    """
    refuse_copies(optimizer, "clipping, because it copies each gradient before the norm of all is known")
    registry = vars(optimizer).get("_masters")
    if registry is not None and registry.config.update == "backward":
        raise RuntimeError(clipping_refused("gradients were to be clipped"))


def clipping_refused(what: str) -> str:
    """Return why gradients cannot be clipped, and what to do."""
    return (
        f"{what}, and `update='backward'` has used and freed them when the norm of all is known. Clip each parameter's"
        " gradient by `MasterConfig(clip_tensor=1.0)`, or by the norm of the step before:"
        " `MasterConfig(clip_last_norm=1.0)`; or use `MasterConfig(update='step')`."
    )
