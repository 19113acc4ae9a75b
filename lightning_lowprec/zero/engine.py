"""DeepSpeed's engine in place of a plugin: backward, steps and loss scale are DeepSpeed's, autocast is the plugin's.

DeepSpeed switches autocast off that was entered outside of its engine. So autocast is entered inside, by hooks of the
model that the engine calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from lightning.fabric.plugins import DeepSpeedPrecision as FabricDeepSpeed
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DeepSpeedPrecision as TrainerDeepSpeed
from torch import Tensor
from torch.nn import Module

from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.engine import Engine
from lightning_lowprec.precision.host import in_trainer
from lightning_lowprec.zero.choice import Choice


@final
class ZeroEngine(Engine):
    """ZeRO's optimizer behind a ``DeepSpeedEngine``.

    Args:
        plugin: the precision that converts the layers.
        choice: what the plugin had chosen.
        stage: 1, 2 or 3.
    """

    def __init__(self, plugin: LowPrecision, choice: Choice, stage: int) -> None:
        self.name = f"DeepSpeed ZeRO-{stage}"
        self.frees_weights = stage == 3
        self.choice = choice
        self.format = None if plugin.backend is None else plugin.format
        """Of the layers that convert, in words; None: no layer converts."""
        self._plugin = plugin
        self._engine: Callable[[], Any] = _no_engine
        self._steps = 0
        self._ended_step = True
        self._autocast: list[torch.autocast] = []
        self._hooks: list[Any] = []

    def attach(self, engine: Any) -> None:
        """Take the ``DeepSpeedEngine`` that ``deepspeed.initialize`` has made, and enter autocast inside of it."""
        self._engine = weakref.ref(engine)
        self._steps = engine.global_steps
        for hook in self._hooks:
            hook.remove()
        enter = engine.module.register_forward_pre_hook(self._enter, prepend=True)
        self._hooks = [enter, engine.module.register_forward_hook(self._leave, always_call=True)]

    @property
    def skipped_steps(self) -> int:
        """DeepSpeed's count."""
        engine = self._engine()
        return 0 if engine is None else int(engine.skipped_steps)

    @property
    def ended_step(self) -> bool:
        """Whether DeepSpeed had all micro-batches of a step at the last call."""
        return self._ended_step

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Call the engine, as Lightning's own plugins do."""
        lightnings: Any = TrainerDeepSpeed if in_trainer(model) else FabricDeepSpeed
        lightnings.backward(self._plugin, tensor, model, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: LightningModule | None, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Call the engine, which counts micro-batches and skipped steps.

        Lightning's Fabric passes ZeRO's optimizer, whose own ``step`` would count neither.
        """
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                f"{self.name}: no engine is there to step. Set model and optimizer up together: `fabric.setup(model,"
                " optimizer)`."
            )
        if model is None:
            output = engine.step(**kwargs)
        else:
            lightnings: Any = TrainerDeepSpeed
            output = lightnings.optimizer_step(self._plugin, optimizer, model=model, closure=closure, **kwargs)
        self._ended_step, self._steps = engine.global_steps != self._steps, engine.global_steps
        return output

    def _enter(self, module: Module, args: Any) -> None:
        device = self._plugin.modules.device
        assert device is not None  # the strategy has set it
        # without a cache, as Lightning does in the Trainer: the weights are half precision, so nothing is cast
        self._autocast.append(torch.autocast(device.type, self.choice.dtype, cache_enabled=False))
        self._autocast[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        self._autocast.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the engine, which cannot move to another process."""
        return {**self.__dict__, "_engine": _no_engine, "_autocast": [], "_hooks": []}


def _no_engine() -> None:
    """Return None, as the weak reference to an engine that is gone does."""
