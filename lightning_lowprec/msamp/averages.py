"""Lightning's callbacks that average weights, over weights of codes.

Their average model is a copy from before the conversion, so its weights are plain float32. In their hooks a weight of
codes reads as its exact values, which are the master's at O3. The averages that the hooks write become codes and
master, even if they round to the present codes. The float32 average stands beside them until a validation is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from torch import nn

from lightning_lowprec.msamp.weight import msamp_state_of

_HOOKS: Final = (
    *("on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)
"""The hooks in which Lightning's callbacks read weights into the average, or put the average into the model."""


def let_average(callbacks: Iterable[Any]) -> None:
    """Run the hooks of these callbacks on the exact values of weights of codes, in this run and in later ones."""
    for callback in callbacks:
        for name in _HOOKS:
            hook = getattr(callback, name)
            if getattr(hook, "func", None) is not _on_exact_values:
                setattr(callback, name, partial(_on_exact_values, hook, name == "on_validation_epoch_start"))


def _on_exact_values(
    hook: Callable[..., None], validates: bool, trainer: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    states = [state for p in model.parameters() if (state := msamp_state_of(p)) is not None]
    for state in states:
        state.averaging = True
    try:
        hook(trainer, model, *args, **kwargs)
    finally:
        for state in states:
            state.averaging = False
            state.average = state.average if validates else None
