"""The part of a step that belongs to a precision, as the Trainer calls the precision's plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowprec import names
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.host import cast_floating

LIGHTNINGS: Final[Mapping[str, torch.dtype | None]] = {"32-true": None, "bf16-mixed": torch.bfloat16, "bf16-true": None}
"""Lightning's precisions, and the dtype of their autocast."""


MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
_ELSEWHERE: Final = "Use `lowprec compare` on a GPU, which measures"


def refusal(precision: str) -> str | None:
    """Return why a precision cannot be simulated, and the remedy; None if it can."""
    if precision in LIGHTNINGS:
        return None
    if precision not in names.TABLE:
        return f"only {', '.join(LIGHTNINGS)} of Lightning's own names are simulated. {_ELSEWHERE}."
    row = names.resolve(precision)
    if row.plugin.backend == "te":
        return (
            "the kernels of Transformer Engine do not run on tensors without values. 'fp8-tensorwise' (torchao) is"
            f" simulated; {_ELSEWHERE[0].lower()}{_ELSEWHERE[1:]}."
        )
    if row.keeps_codes:
        return f"MS-AMP's tensors of codes need values. `lowprec plan` shows their bytes at rest. {_ELSEWHERE}."
    return None


class Running(Protocol):
    """A precision while a model trains."""

    def prepare(self, optimizer: MakeOptimizer) -> Optimizer:
        """Convert the model, and return its optimizer."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of the forward."""

    def input(self, batch: Any) -> Any:
        """Convert a batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights."""


def running(precision: str, options: Mapping[str, Any], model: nn.Module, device: torch.device) -> Running:
    """Return what runs ``precision``, Lightning's or ours."""
    if precision in LIGHTNINGS:
        return _Lightnings(precision, model, device)
    row = names.resolve(precision)
    plugin = row.plugin(**{**row.options, **options})
    return _Ours(plugin, model, device)


@final
class _Lightnings:
    """Lightning's own precision."""

    def __init__(self, precision: str, model: nn.Module, device: torch.device) -> None:
        self._precision, self._model, self._device = precision, model, device

    def prepare(self, optimizer: MakeOptimizer) -> Optimizer:
        """Cast the weights of ``bf16-true``."""
        if self._precision == "bf16-true":
            for held in (*self._model.parameters(), *self._model.buffers()):
                if held.is_floating_point():
                    held.data = held.data.to(torch.bfloat16)
        return optimizer(self._model.parameters())

    def forward(self) -> AbstractContextManager[Any]:
        """Return autocast, without a cache of casts, as in the Trainer."""
        dtype = LIGHTNINGS[self._precision]
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def input(self, batch: Any) -> Any:
        """Cast as ``bf16-true`` does."""
        return cast_floating(batch, torch.bfloat16) if self._precision == "bf16-true" else batch

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights."""
        optimizer.step()


@final
class _Ours:
    """A precision of this package."""

    def __init__(self, plugin: LowPrecision, model: nn.Module, device: torch.device) -> None:
        self._plugin, self._model, self._device = plugin, model, device

    def prepare(self, optimizer: MakeOptimizer) -> Optimizer:
        """Convert the model, and give the optimizer masters."""
        self._plugin.bind_device(self._device)
        self._plugin.convert_module(self._model)
        made = optimizer(self._model.parameters())
        self._plugin.see_optimizer(made)
        return made

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter the plugin's context, without a cache of casts, as in the Trainer."""
        with ExitStack() as stack:
            stack.enter_context(self._plugin.forward_context())
            kind = self._device.type
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False))
            yield

    def input(self, batch: Any) -> Any:
        """Cast as the plugin does."""
        return self._plugin.convert_input(batch)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        self._plugin.backward(loss, None)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights, and the masters."""
        self._plugin.optimizer_step(optimizer)
