"""Run compiled code without the compiler for a while: hooks that came after compilation are no part of compiled code.

Nothing is compiled anew, neither then nor afterwards. An optimizer's step runs as always: its kernels may be compiled,
and its results must not depend on a monitor.
"""

import sys
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_lowprec.private.lightning import COMPILED_NAME
from lightning_lowprec.private.torch_modules import is_compiled
from lightning_lowprec.private.torch_optimizers import sees_no_masters


def may_compile(model: nn.Module) -> bool:
    """Return whether calls of ``model`` may be compiled: the model, a module in it, or a LightningModule's methods."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(is_compiled(module) or getattr(module, COMPILED_NAME, None) is not None for module in model.modules())


@final
class PausedCompiler:
    """torch's compiler, which :meth:`pause` pauses for forward and backward until :meth:`resume`."""

    def __init__(self) -> None:
        self._stance = ExitStack()
        self._handles: list[Any] = []

    def pause(self) -> None:
        """Run compiled code eagerly from now on, except within the step of an optimizer."""
        if self._handles:
            return
        self._set()

        @sees_no_masters
        def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not _has_closure(args, kwargs):  # a closure runs forward and backward within the step
                self._stance.close()

        @sees_no_masters
        def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not _has_closure(args, kwargs):
                self._set()

        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def resume(self) -> None:
        """Run compiled code by the compiler again; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._stance.close()

    def _set(self) -> None:
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(callable(value) for value in (*args[:1], kwargs.get("closure")))
