"""Find out who runs a module (Trainer, Fabric or an engine) and on which device; hide hooks from Fabric.

Trainer and Fabric call the same hooks with different signatures:

* backward: the Trainer calls ``backward(loss, module, optimizer, *args)`` and expects ``pre_backward`` and
  ``post_backward`` to run its hooks and to return the loss; Fabric calls ``backward(loss, module_or_None, *args)``
  and ignores the results of the other two. A LightningModule inside Fabric belongs to Fabric.
* step: the Trainer calls ``optimizer_step(optimizer, model=, closure=)``, Fabric ``optimizer_step(optimizer)``.
* Fabric demands ``fabric.backward(loss)`` as soon as a plugin overrides a backward hook. Without loss scaling, users
  may call ``loss.backward()``, so the hooks pretend to be Fabric's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.hardware import default_device
from lightning_lowprec.private.either import LightningModule, Trainer, both
from lightning_lowprec.private.lightning import check_precision_plugin

check_precision_plugin()

F = TypeVar("F", bound=Callable[..., Any])


def trainer_of(module: Module | None) -> Trainer | None:
    """Return the Trainer that runs ``module``; None for a plain module or a LightningModule inside Fabric."""
    if not isinstance(module, both(LightningModule)):
        return None
    try:
        trainer = module.trainer
    except RuntimeError:  # no Trainer is attached
        return None
    return trainer if isinstance(trainer, both(Trainer)) else None  # Fabric attaches a shim


def callbacks_of(model: Module) -> list[object]:
    """Return the callbacks of the Trainer that runs ``model``, which DDP may have wrapped."""
    trainer = trainer_of(model.module if isinstance(model, DistributedDataParallel) else model)
    return list(getattr(trainer, "callbacks", ()))


def shown_as(original: Callable[..., object]) -> Callable[[F], F]:
    """Hide an override from Fabric, which compares the code objects behind ``__wrapped__`` with its own hooks."""

    def decorate(hook: F) -> F:
        hook.__wrapped__ = original  # type: ignore[attr-defined]
        return hook

    return decorate


def device_of(module: Module) -> torch.device:
    """Return the device of the parameters; without parameters, or on meta, Lightning's default device."""
    parameter = next(module.parameters(), None)
    return default_device() if parameter is None or parameter.is_meta else parameter.device


def cast_floating(data: object, dtype: torch.dtype) -> object:
    """Cast the floating-point tensors of a collection; leave everything else unchanged."""
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


class Engine(ABC):
    """Trains in place of a precision plugin, which converts layers alone (DeepSpeed).

    The engine has the backward passes, steps, half-precision weights, masters and the loss scale, and enters the
    autocast around the model.
    """

    name: str  # for messages: "DeepSpeed ZeRO-3"
    frees_weights: bool
    """Whether the engine frees gathered weights between two uses, so that nothing may keep their memory or codes."""
    ended_step: bool = True
    """Whether the last call of :meth:`optimizer_step` ended an optimizer step: False between micro-batches."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """How many optimizer steps the engine has skipped, because a gradient was not finite."""

    @abstractmethod
    def backward(self, tensor: Tensor, model: Module | None, *args: object, **kwargs: object) -> None:
        """Compute the gradients of a loss."""

    @abstractmethod
    def optimizer_step(
        self, optimizer: object, model: LightningModule | None, closure: Callable[[], object] | None, **kwargs: object
    ) -> Any:
        """Run the closure, and step where the engine has all micro-batches of the step."""
