"""Connect a plugin with Lightning's DeepSpeedStrategy, of Trainer or Fabric, when both are known.

Trainer(...), Fabric(...)   the config is translated; the plugin leaves backward and steps to the engine
zero.Init, if the user's ``configure_model`` creates weights cut
convert_module              layers are converted, in place
optimizer made              its membership is checked
deepspeed.initialize        casts the weights, makes float32 masters, cuts
attach                      autocast inside of the engine
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies import DeepSpeedStrategy as TrainerStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_lowprec.conversion.steps import count_step
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.private import deepspeed as private
from lightning_lowprec.zero.choice import Choice, check_plugin, stage_of
from lightning_lowprec.zero.config import SCALE_FIELDS, translated
from lightning_lowprec.zero.engine import ZeroEngine
from lightning_lowprec.zero.stale_locks import check_locks

DEEPSPEED = (FabricStrategy, TrainerStrategy)
"""Lightning's strategies."""


def bind(plugin: LowPrecision, strategy: Any) -> None:
    """Translate the plugin's choice into the strategy's config, and leave the training steps to the strategy's engine.

    Args:
        plugin: the precision's; its device is known.
        strategy: one of :data:`DEEPSPEED`, not set up yet.

    Raises:
        ValueError: the precision does not run there, or the config says otherwise.
        ImportError: this DeepSpeed is too old, or has moved a name.
        RuntimeError: a killed compilation has left a lock that DeepSpeed would wait for.
    """
    private.check()
    stage = stage_of(strategy.config)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"`precision={plugin.precision!r}` runs under stages 1, 2 and 3 of ZeRO, got `stage={stage}` in the"
            " DeepSpeed config. Without ZeRO use `strategy='ddp'`."
        )
    check_plugin(plugin, f"deepspeed_stage_{stage}")
    if isinstance(plugin, HalfMixed):
        plugin.decide(strategy.root_device)
    choice = plugin.engine.choice if isinstance(plugin.engine, ZeroEngine) else Choice.of(plugin)
    engine = ZeroEngine(plugin, choice, stage)
    refusal = plugin.engine_refusal(engine)
    if refusal is not None:
        raise ValueError(f"`precision={plugin.precision!r}` does not run under {engine.name}: {refusal}.")
    arguments = {field: getattr(strategy, field) for field in SCALE_FIELDS}
    strategy.config = translated(strategy.config, choice, arguments)
    check_locks()
    plugin.bind_engine(engine)
    _wrap(plugin, engine, strategy)


def _wrap(plugin: LowPrecision, engine: ZeroEngine, strategy: Any) -> None:
    in_trainer = isinstance(strategy, TrainerStrategy)
    if in_trainer:
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
    trainer = strategy.lightning_module.trainer
    asked, found = trainer.gradient_clip_val, strategy.config.get("gradient_clipping", 0.0)
    if asked is not None and asked != found:
        raise MisconfigurationException(
            f"`gradient_clip_val={asked!r}` contradicts `gradient_clipping={found!r}` of the DeepSpeed config. Leave"
            " one of them out."
        )
    original()
    _attach(engine, strategy.model)


def _set_up_module(engine: ZeroEngine, original: Callable[[Any], Any], module: Any) -> Any:
    """Fabric: initialize DeepSpeed without an optimizer."""
    made = original(module)
    _attach(engine, made)
    return made


def _set_up(
    plugin: LowPrecision, engine: ZeroEngine, original: Callable[..., Any], module: Any, optimizers: Any, *args: Any
) -> Any:
    """Fabric: initialize DeepSpeed."""
    for optimizer in optimizers:
        _check_optimizer(plugin, module, optimizer)
    made = original(module, optimizers, *args)
    _attach(engine, made[0])
    return made


def _check_optimizer(plugin: LowPrecision, model: Any, optimizer: Optimizer | None) -> None:
    """Check the optimizer's weights; take back what another precision left in one."""
    if optimizer is not None:  # else the DeepSpeed config has an optimizer, which takes every parameter
        plugin.see_optimizer(optimizer)
        plugin._check_optimizers([optimizer])
    plugin.modules.note_check()


def _attach(engine: ZeroEngine, made: Any) -> None:
    engine.attach(made)
    dtype = "bf16" if made.bfloat16_enabled() else "fp16"
    moved = "gathers weights" if engine.frees_weights else "gathers updated weights"
    products = f"; {engine.format} is for matrix products alone" if engine.format else ""
    rank_zero_info(
        f"{engine.choice.precision}: {engine.name} keeps {dtype} weights with float32 masters, {moved} in {dtype} and"
        f" {'scales the loss' if dtype == 'fp16' else 'scales no loss'}{products}."
    )


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint; codes that were made from weights before it are stale."""
    loaded = original(*args, **kwargs)
    count_step()
    return loaded
