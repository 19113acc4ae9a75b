"""Who runs a module, Trainer or Fabric, and what Fabric sees of a plugin's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module

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
