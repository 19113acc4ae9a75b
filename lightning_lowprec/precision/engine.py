"""An engine that trains in place of a precision plugin: the plugin converts layers, and the engine does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module


class Engine(ABC):
    """Backward passes, steps, half-precision weights, masters and loss scale of a strategy that has these itself.

    The plugin enters no autocast around such an engine. The engine enters the autocast around the model.
    """

    name: str
    """The name for messages: ``"DeepSpeed ZeRO-3"``."""
    frees_weights: bool
    """Whether the engine frees gathered weights between two uses, so that nothing may keep their memory or codes."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """How many optimizer steps the engine has skipped, because a gradient was not finite."""

    @property
    @abstractmethod
    def ended_step(self) -> bool:
        """Whether the last call of :meth:`optimizer_step` ended an optimizer step: False between micro-batches."""

    @abstractmethod
    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""

    @abstractmethod
    def optimizer_step(
        self, optimizer: Any, model: LightningModule | None, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Run the closure, and step where the engine has all micro-batches of the step."""
