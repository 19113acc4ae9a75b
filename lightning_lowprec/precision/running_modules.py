"""Find the module that runs an operation, by the frames of Python: hooks would make compiled code compile again."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any, Final, final

from torch.nn import Module

from lightning_lowprec.private.operations import Operations
from lightning_lowprec.private.torch_modules import is_compiled

_OURS: Final = __name__.partition(".")[0] + "."
_WATCHES: Final = (
    *(f"{_OURS}precision.{file}" for file in ("running_modules", "layer_calls", "float32_products")),
    Operations.__module__,
)
_DISABLED: Final = "torch._dynamo.eval_frame"
_CALLS: Final = ("forward", "_call_impl")
_COMPILED: Final = ("torch._inductor.", "torch._functorch.", "torch.fx.")
"""Modules whose frames lie between an operation of compiled code and the module that was compiled."""


@final
class RunningModules:
    """The modules of some models, by id.

    Args:
        models: the models.
        layers: the ids of converted layers, of which only calls count: they also encode weights outside of them.
    """

    def __init__(self, models: Iterable[Module], layers: Collection[int]) -> None:
        self._layers = layers
        named = [(fqn or type(model).__name__, m) for model in models for fqn, m in model.named_modules()]
        self.names = {id(module): fqn for fqn, module in named}
        self.compiled = {id(module) for _, module in named if is_compiled(module)}
        """The ids of the modules that are compiled: which modules they call is not seen."""

    def innermost(self) -> tuple[int | None, bool]:
        """Return the id of the innermost module that runs, and whether this package computes the operation."""
        frame: Any = inspect.currentframe()
        ours, in_compiled, inner = False, False, ""
        while frame is not None:
            where = str(frame.f_globals.get("__name__"))
            if where in _WATCHES:
                frame = frame.f_back
                continue
            ours |= where.startswith(_OURS)
            module = self._module_of(frame)
            if module is not None and (in_compiled or inner == _DISABLED):  # what the compiler made is called by it
                self.compiled.add(module)
                return None, False
            if module is not None:
                return module, ours
            in_compiled |= where.startswith(_COMPILED) or frame.f_code.co_name.startswith("torch_dynamo_resume")
            frame, inner = frame.f_back, where
        return None, ours

    def _module_of(self, frame: Any) -> int | None:
        """Return the id of the module of which the frame is a method."""
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return None
        key = id(frame.f_locals.get("self"))
        if key not in self.names or (key in self._layers and code.co_name not in _CALLS):
            return None
        return key
