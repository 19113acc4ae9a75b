"""Who runs a module, Trainer or Fabric, on which device; and what Fabric sees of a plugin's hooks.

The two call the same hooks with different signatures:

* backward: the Trainer calls ``backward(loss, module, optimizer, *args)`` and expects ``pre_backward`` and
  ``post_backward`` to run its hooks and to return the loss; Fabric calls ``backward(loss, module_or_None, *args)``
  and ignores what the other two return. A LightningModule inside Fabric belongs to Fabric.
* step: the Trainer calls ``optimizer_step(optimizer, model=, closure=)``, Fabric ``optimizer_step(optimizer)``.
* Fabric demands ``fabric.backward(loss)`` as soon as a plugin overrides a backward hook. A plugin without loss
  scaling must not cost its users ``loss.backward()``, so its hooks show themselves as Fabric's own there. (Accumulating
  in float32 under DDP does cost it.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module

from lightning_lowprec.hardware import default_device
from lightning_lowprec.private.lightning import check_precision_plugin

check_precision_plugin()

F = TypeVar("F", bound=Callable[..., Any])


def trainer_of(module: Module | None) -> Trainer | None:
    """The Trainer that runs ``module``, or None: a plain module, or a LightningModule inside Fabric."""
    if not isinstance(module, LightningModule):
        return None
    try:
        trainer = module.trainer
    except RuntimeError:  # not attached
        return None
    return trainer if isinstance(trainer, Trainer) else None  # Fabric attaches a shim


def in_trainer(module: Module | None) -> TypeGuard[LightningModule]:
    """Whether a Trainer runs ``module``."""
    return trainer_of(module) is not None


def shown_as(original: Callable[..., Any]) -> Callable[[F], F]:
    """Let Fabric's "is this hook overridden?" find the original: it compares code objects behind ``__wrapped__``."""

    def decorate(hook: F) -> F:
        hook.__wrapped__ = original  # type: ignore[attr-defined]
        return hook

    return decorate


def device_of(module: Module) -> torch.device:
    """Where the module's parameters are; a module without any, or on meta, will be where Lightning puts it."""
    parameter = next(module.parameters(), None)
    return default_device() if parameter is None or parameter.is_meta else parameter.device


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of any collection, cast; everything else as it is."""
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
