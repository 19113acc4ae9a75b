"""Gradient checkpointing of transformers, by Transformer Engine's checkpoint: torch's cannot restore delayed scales.

``model.gradient_checkpointing_enable()`` leaves a function on every module that may be checkpointed; that one is
replaced while the model runs with delayed scaling.

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import transformer_engine.pytorch as te
from torch import nn

FUNCTION: Final = "_gradient_checkpointing_func"
"""Where transformers keeps the function (4.35 to 5)."""


@final
class TECheckpoint:
    """``checkpoint(function, *args)`` of Transformer Engine, in the place of another."""

    def __init__(self, was: Callable[..., Any]) -> None:
        self.was = was

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` now, and again in the backward pass, with the scales it had."""
        kwargs.pop("use_reentrant", None)
        return te.checkpoint(function, *args, use_reentrant=False, **kwargs)


def checkpoint_by_te(model: nn.Module, *, wanted: bool) -> None:
    """Replace the functions of ``model``, or put back what they were."""
    for module in model.modules():
        function = module.__dict__.get(FUNCTION)
        if wanted and function is not None and not isinstance(function, TECheckpoint):
            module.__dict__[FUNCTION] = TECheckpoint(function)
        elif not wanted and isinstance(function, TECheckpoint):
            module.__dict__[FUNCTION] = function.was
