"""DeepSpeed's engine in place of a plugin: backward, steps and loss scale are DeepSpeed's, autocast is the plugin's.

A plugin and Lightning's DeepSpeedStrategy, of Trainer or Fabric, are connected when both are known (:func:`bind`):

Trainer(...), Fabric(...)   the config is translated; the plugin leaves backward and steps to the engine
zero.Init, if the user's ``configure_model`` creates weights cut
convert_module              layers are converted, in place
optimizer made              its membership is checked
deepspeed.initialize        casts the weights, makes float32 masters, cuts
attach                      autocast inside of the engine

DeepSpeed switches autocast off that was entered outside of its engine. So autocast is entered inside, by hooks of the
model that the engine calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion.steps import count_step
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.precision.host import Engine, in_trainer
from lightning_lowprec.private import deepspeed as private
from lightning_lowprec.private.either import (
    FabricDeepSpeed,
    LightningModule,
    MisconfigurationException,
    TrainerDeepSpeed,
    both,
    fabric_strategies,
    namesake,
    trainer_strategies,
)
from lightning_lowprec.zero.config import SCALE_FIELDS, ZeroOptions, check_plugin, translated

DEEPSPEED: Final = (fabric_strategies.DeepSpeedStrategy, trainer_strategies.DeepSpeedStrategy)
"""Lightning's strategies."""


@final
class ZeroEngine(Engine):
    """ZeRO's optimizer behind a ``DeepSpeedEngine``, at a stage from 1 to 3."""

    def __init__(self, plugin: LowPrecision, options: ZeroOptions, stage: int) -> None:
        self.name = f"DeepSpeed ZeRO-{stage}"
        self.frees_weights = stage == 3
        self.options = options
        self.format = None if plugin.backend is None else plugin.format
        """Of the layers that convert, in words; None: no layer converts."""
        self._plugin = plugin
        self._engine: weakref.ref[Any] | None = None
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
        dtype = "bf16" if engine.bfloat16_enabled() else "fp16"
        moved = "gathers weights" if self.frees_weights else "gathers updated weights"
        products = f"; {self.format} is for matrix products alone" if self.format else ""
        rank_zero_info(
            f"{self.options.precision}: {self.name} keeps {dtype} weights with float32 masters, {moved} in {dtype} and"
            f" {'scales the loss' if dtype == 'fp16' else 'scales no loss'}{products}."
        )

    @property
    def skipped_steps(self) -> int:
        """DeepSpeed's count."""
        engine = None if self._engine is None else self._engine()
        return 0 if engine is None else int(engine.skipped_steps)

    @property
    def ended_step(self) -> bool:
        """Whether DeepSpeed had all micro-batches of a step at the last call."""
        return self._ended_step

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Call the engine, as Lightning's own plugins do."""
        lightnings: Any = namesake(TrainerDeepSpeed, model) if in_trainer(model) else FabricDeepSpeed
        lightnings.backward(self._plugin, tensor, model, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: LightningModule | None, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Call the engine, which counts micro-batches and skipped steps.

        Lightning's Fabric passes ZeRO's optimizer, whose own ``step`` would count neither.
        """
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise RuntimeError(
                f"{self.name}: no engine is there to step. Set model and optimizer up together: `fabric.setup(model,"
                " optimizer)`."
            )
        if model is None:
            output = engine.step(**kwargs)
        else:
            lightnings: Any = namesake(TrainerDeepSpeed, model)
            output = lightnings.optimizer_step(self._plugin, optimizer, model=model, closure=closure, **kwargs)
        self._ended_step, self._steps = engine.global_steps != self._steps, engine.global_steps
        return output

    def _enter(self, module: Module, args: Any) -> None:
        device = self._plugin.modules.device
        assert device is not None  # the strategy has set it
        # without a cache, as Lightning does in the Trainer: the weights are half precision, so nothing is cast
        self._autocast.append(torch.autocast(device.type, self.options.dtype, cache_enabled=False))
        self._autocast[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        self._autocast.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the engine, which cannot move to another process."""
        return {**self.__dict__, "_engine": None, "_autocast": [], "_hooks": []}


def bind(plugin: LowPrecision, strategy: Any) -> None:
    """Translate the plugin's options into the strategy's config, and leave the training steps to its engine.

    The plugin knows its device. The strategy, one of :data:`DEEPSPEED`, is not set up yet.

    Raises:
        ValueError: the precision does not run there, or the config says otherwise.
        ImportError: this DeepSpeed is too old, or has moved a name.
    """
    private.check()
    stage = int(strategy.config.get("zero_optimization", {}).get("stage", 0))
    if stage not in (1, 2, 3):
        raise ValueError(
            f"`precision={plugin.precision!r}` runs under stages 1, 2 and 3 of ZeRO, got `stage={stage}` in the"
            " DeepSpeed config. Without ZeRO use `strategy='ddp'`."
        )
    check_plugin(plugin, f"deepspeed_stage_{stage}")
    if isinstance(plugin, HalfMixed):
        plugin.decide(strategy.root_device)
    options = plugin.engine.options if isinstance(plugin.engine, ZeroEngine) else ZeroOptions.of(plugin)
    engine = ZeroEngine(plugin, options, stage)
    if (refusal := plugin.engine_refusal(engine)) is not None:
        raise ValueError(f"`precision={plugin.precision!r}` does not run under {engine.name}: {refusal}.")
    arguments = {field: getattr(strategy, field) for field in SCALE_FIELDS}
    strategy.config = translated(strategy.config, options, arguments)
    plugin.bind_engine(engine)
    for_trainer = isinstance(strategy, both(trainer_strategies.DeepSpeedStrategy))
    if for_trainer:
        private.before_initialize(strategy, partial(_check_optimizer, plugin))
        strategy.init_deepspeed = partial(_initialize, engine, strategy, strategy.init_deepspeed)
    else:
        strategy.setup_module = partial(_set_up_module, engine, strategy.setup_module)
        strategy.config.setdefault("gradient_clipping", 0.0)  # else DeepSpeed clips at 1.0; the Trainer sets it itself
        joint = strategy.setup_module_and_optimizers
        strategy.setup_module_and_optimizers = partial(_set_up, plugin, engine, joint)
    strategy.load_checkpoint = partial(_load, strategy.load_checkpoint)


def _initialize(engine: ZeroEngine, strategy: Any, original: Callable[[], None]) -> None:
    """Trainer: initialize DeepSpeed."""
    asked = strategy.lightning_module.trainer.gradient_clip_val
    configured = strategy.config.get("gradient_clipping", 0.0)
    if asked is not None and asked != configured:
        raise MisconfigurationException(
            f"`gradient_clip_val={asked!r}` contradicts `gradient_clipping={configured!r}` of the DeepSpeed config."
            " Leave one of them out."
        )
    original()
    engine.attach(strategy.model)


def _set_up_module(engine: ZeroEngine, original: Callable[[Any], Any], module: Any) -> Any:
    """Fabric: initialize DeepSpeed without an optimizer."""
    deepspeed_engine = original(module)
    engine.attach(deepspeed_engine)
    return deepspeed_engine


def _set_up(
    plugin: LowPrecision, engine: ZeroEngine, original: Callable[..., Any], module: Any, optimizers: Any, *args: Any
) -> Any:
    """Fabric: initialize DeepSpeed."""
    for optimizer in optimizers:
        _check_optimizer(plugin, module, optimizer)
    objects = original(module, optimizers, *args)
    engine.attach(objects[0])
    return objects


def _check_optimizer(plugin: LowPrecision, model: Any, optimizer: Optimizer | None) -> None:
    """Check the optimizer's weights; take back what another precision left in one."""
    if optimizer is not None:  # else the DeepSpeed config has an optimizer, which takes every parameter
        plugin.see_optimizer(optimizer)
        plugin._check_optimizers([optimizer])
    plugin.modules.note_check()


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint; codes that were made from weights before it are stale."""
    loaded = original(*args, **kwargs)
    count_step()
    return loaded
