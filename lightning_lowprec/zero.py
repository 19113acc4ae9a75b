"""DeepSpeed's engine in place of a plugin: backward, steps and loss scale are DeepSpeed's, autocast is the plugin's.

A plugin and Lightning's DeepSpeedStrategy, of Trainer or Fabric, are connected when both are known (:func:`bind`):

Trainer(...), Fabric(...)   the config is translated; the plugin leaves backward and steps to the engine
zero.Init, if the user's ``configure_model`` creates weights cut
convert_module              layers are converted, in place
optimizer made              its membership is checked
deepspeed.initialize        casts the weights, makes float32 masters, cuts
attach                      autocast inside of the engine, by hooks of the model: DeepSpeed switches others off

The options of the plugin become fields of the config (:func:`translated`; docs/deepspeed.md has the table). A field
that the user has set already must have the same value, or be ``"auto"``.
"""

import copy
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion import declared
from lightning_lowprec.conversion.name_formats import split
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.weights import HalfWeights
from lightning_lowprec.messages import info
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.precision.host import Engine, trainer_of
from lightning_lowprec.precision.loss_scale import LossScale, LossScaler
from lightning_lowprec.precision.refusals import two_dtypes
from lightning_lowprec.precision.set_up import check_optimizers
from lightning_lowprec.private import deepspeed as private
from lightning_lowprec.private import either
from lightning_lowprec.private.torch_optimizers import count_step

DEEPSPEED: Final = (either.fabric_strategies.DeepSpeedStrategy, either.trainer_strategies.DeepSpeedStrategy)
SCALE_FIELDS: Final[Mapping[str, float]] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""The fields of ``fp16`` that Lightning's DeepSpeedStrategy takes as arguments too, with Lightning's defaults."""
_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class ZeroOptions:
    """The options of a plugin that DeepSpeed carries out, as they were before an engine took the plugin's work over."""

    precision: str
    dtype: torch.dtype  # of the weights, half precision
    scaler: LossScaler | None
    masters: HalfWeights | None

    @classmethod
    def of(cls, plugin: LowPrecision) -> "ZeroOptions":
        """Return the options of a plugin whose device is known."""
        return cls(plugin.precision, plugin.autocast_dtype, plugin.scaler, plugin.masters)


def check_plugin(plugin: LowPrecision, strategy: str) -> None:
    """Raise ValueError, naming ``strategy``, if a precision cannot run under DeepSpeed, whatever the stage."""
    if plugin.engine is not None:  # it has checked and taken the options before
        return
    reason, usual = None, MasterConfig()
    config = usual if plugin.masters is None else plugin.masters.config
    differing = [name for name in ("form", "moments") if getattr(config, name) != getattr(usual, name)]
    if differing:
        stem = split(plugin.precision)[0]
        other = "bf16-master" if stem == "bf16" else stem
        reason = (
            f"ZeRO keeps the masters itself, in float32, and has no `{differing[0]}={getattr(config, differing[0])!r}`."
            f" Use `precision={other!r}`, or run {plugin.precision!r} on one device, under 'ddp' and under 'fsdp2'"
        )
    elif plugin.weights is None:
        reason = (
            "`weights='keep'` trains half-precision weights without masters, and ZeRO always has float32 masters. Leave"
            " `weights` out"
        )
    elif plugin.head != "bf16":
        reason = (
            f"`head={plugin.head!r}` reads the weight of the output head outside of its layer, where ZeRO does not"
            " see it. Leave `head` out, or use 'fsdp2'"
        )
    elif plugin.not_sharded is not None:
        reason = f"`{plugin.not_sharded}` keeps weights in FP8, and ZeRO gathers them in half precision. Leave it out"
    if reason is not None:
        raise ValueError(f"`precision={plugin.precision!r}` does not run under `strategy={strategy!r}`: {reason}.")


def translated(source: Mapping[str, object], options: ZeroOptions, arguments: Mapping[str, float]) -> dict[str, object]:
    """Return a copy of ``source``, the config of the user or the strategy, with the plugin's options in it.

    ``arguments`` are :data:`SCALE_FIELDS` as the strategy was given them. Contradictions raise ValueError.
    """
    config = copy.deepcopy(dict(source))
    if "bfloat16" in config:  # DeepSpeed's own older name
        config.setdefault("bf16", config.pop("bfloat16"))
    half = _NAMES[options.dtype]
    other = "fp16" if half == "bf16" else "bf16"
    _set(config, options, f"{half}.enabled", True)
    for field in (f"{other}.enabled", f"{half}.{half}_master_weights_and_grads", "torch_autocast.enabled"):
        if _get(config, field) not in (None, False):
            _set(config, options, field, False)
    if half == "fp16":
        _scale_loss(config, options, arguments)
    elif options.scaler is not None:  # skips steps
        _set(config, options, "bf16.check_grad_overflow", True)
    if (masters := options.masters) is not None:
        dtypes = {
            "data_types.grad_accum_dtype": masters.accumulation,
            "data_types.buffer_dtype": masters.buffer_dtype,
        }
        for field, dtype in dtypes.items():
            if dtype is not None:  # else DeepSpeed's default
                _set(config, options, field, _NAMES[dtype])
    return config


def _scale_loss(config: dict[str, Any], options: ZeroOptions, arguments: Mapping[str, float]) -> None:
    """Write the fields of the loss scale; the default scale leaves them to the config and the strategy."""
    assert options.scaler is not None  # fp16 always scales the loss
    if options.scaler.config == LossScale():
        for field, value in arguments.items():
            config["fp16"].setdefault(field, value)
        return
    for field, value in scale_fields(options.scaler.config, options.precision).items():
        argument = arguments[field]
        if argument != SCALE_FIELDS[field] and argument != value:
            raise _contradiction(options, f"fp16.{field}", value, "the strategy has", f"{field}={argument!r}")
        _set(config, options, f"fp16.{field}", value)


def scale_fields(scale: LossScale, precision: str) -> dict[str, float]:
    """Return a loss scale as the fields of DeepSpeed's ``fp16`` section; a ValueError names ``precision``.

    DeepSpeed's scale doubles, halves, starts at a power of two, and stops the run at its floor, an integer, at once.
    """
    if scale.growth_factor == scale.backoff_factor == 1.0:
        return {"loss_scale": scale.initial}
    allowed: tuple[tuple[str, object, bool, str], ...] = (
        ("initial", scale.initial, math.log2(scale.initial).is_integer(), "a power of two"),
        ("growth_factor", scale.growth_factor, scale.growth_factor == 2.0, "2.0"),
        ("backoff_factor", scale.backoff_factor, scale.backoff_factor == 0.5, "0.5"),
        ("floor", scale.floor, float(scale.floor).is_integer(), "an integer from 1"),
        ("patience_at_floor", scale.patience_at_floor, scale.patience_at_floor in (1, 50), "the default"),
    )
    for field, value, fits, expected in allowed:
        if not fits:
            raise ValueError(
                f"`precision={precision!r}`: `LossScale({field}={value!r})` is not possible under DeepSpeed, which"
                f" scales the loss itself; expected {expected}. Change the field, or use 'ddp' or 'fsdp2'."
            )
    return {
        "loss_scale": 0,
        "initial_scale_power": int(math.log2(scale.initial)),
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis,
        "min_loss_scale": int(scale.floor),
    }


def _get(config: Mapping[str, Any], field: str) -> Any:
    section, _, name = field.rpartition(".")
    return (config.get(section) or {}).get(name)


def _set(config: dict[str, Any], options: ZeroOptions, field: str, value: object) -> None:
    before = _get(config, field)
    if before not in (None, "auto", value):
        raise _contradiction(options, field, value, "the DeepSpeed config has", f"{field}={before!r}")
    section, _, name = field.rpartition(".")
    config.setdefault(section, {})[name] = value


def _contradiction(options: ZeroOptions, field: str, value: object, who: str, got: str) -> ValueError:
    return ValueError(
        f"`precision={options.precision!r}` means `{field}={value!r}`, and {who} `{got}`. Leave the latter out, or"
        " choose a precision that fits."
    )


# ---- the engine


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
        self._autocast: list[AbstractContextManager[None]] = []
        self._hooks: list[Any] = []

    def attach(self, engine: Any) -> None:
        """Take the ``DeepSpeedEngine`` that ``deepspeed.initialize`` has made, and enter autocast inside of it."""
        self._engine = weakref.ref(engine)
        private.explain_loading(engine, self.options.precision)
        for hook in self._hooks:
            hook.remove()
        enter = engine.module.register_forward_pre_hook(self._enter, prepend=True)
        self._hooks = [enter, engine.module.register_forward_hook(self._leave, always_call=True)]
        dtype = "bf16" if engine.bfloat16_enabled() else "fp16"
        moved = "gathers weights" if self.frees_weights else "gathers updated weights"
        products = f"; {self.format} is for matrix products alone" if self.format else ""
        info(
            f"{self.options.precision}: {self.name} keeps {dtype} weights with float32 masters, {moved} in {dtype} and"
            f" {'scales the loss' if dtype == 'fp16' else 'scales no loss'}{products}."
        )

    @property
    def skipped_steps(self) -> int:
        """DeepSpeed's count."""
        engine = None if self._engine is None else self._engine()
        return 0 if engine is None else int(engine.skipped_steps)

    def backward(self, tensor: Tensor, model: Module | None, *args: object, **kwargs: object) -> None:
        """Call the engine, as Lightning's own plugins do."""
        lightnings: Any = either.FabricDeepSpeed
        if trainer_of(model) is not None:
            lightnings = either.namesake(either.TrainerDeepSpeed, type(model))
        lightnings.backward(self._plugin, tensor, model, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: either.LightningModule | None, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Call the engine, which counts micro-batches and skipped steps: ``step`` of ZeRO's optimizer would not."""
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise RuntimeError(
                f"{self.name}: no engine is there to step. Set model and optimizer up together: `fabric.setup(model,"
                " optimizer)`."
            )
        before = engine.global_steps  # loading a checkpoint changes the number, too
        if model is None:
            output = engine.step(**kwargs)
        else:
            lightnings: Any = either.namesake(either.TrainerDeepSpeed, type(model))
            output = lightnings.optimizer_step(self._plugin, optimizer, model=model, closure=closure, **kwargs)
        self.ended_step = engine.global_steps != before
        return output

    def _enter(self, module: Module, args: object) -> None:
        device = self._plugin.modules.device
        assert device is not None  # the strategy has set it
        # without a cache, as Lightning does in the Trainer: the weights are half precision, so nothing is cast
        why = two_dtypes(self.options.precision, self.options.dtype)
        self._autocast.append(declared.forward(device.type, self.options.dtype, cache=False, half_weights=why))
        self._autocast[-1].__enter__()

    def _leave(self, module: Module, args: object, output: object) -> None:
        self._autocast.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_engine": None, "_autocast": [], "_hooks": []}


def bind(plugin: LowPrecision, strategy: Any) -> None:
    """Translate the plugin's options into the config of a :data:`DEEPSPEED` strategy, whose engine makes the steps."""
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
    for_trainer = isinstance(strategy, either.both(either.trainer_strategies.DeepSpeedStrategy))
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
        raise either.MisconfigurationException(
            f"`gradient_clip_val={asked!r}` contradicts `gradient_clipping={configured!r}` of the DeepSpeed config."
            " Leave one of them out."
        )
    original()
    engine.attach(strategy.model)


def _set_up_module(engine: ZeroEngine, original: Callable[[object], object], module: object) -> object:
    """Fabric: initialize DeepSpeed without an optimizer."""
    deepspeed_engine = original(module)
    engine.attach(deepspeed_engine)
    return deepspeed_engine


def _set_up(
    plugin: LowPrecision, engine: ZeroEngine, original: Callable[..., Any], module: Any, optimizers: Any, *args: Any
) -> object:
    """Fabric: initialize DeepSpeed."""
    for optimizer in optimizers:
        _check_optimizer(plugin, module, optimizer)
    objects = original(module, optimizers, *args)
    engine.attach(objects[0])
    return objects


def _check_optimizer(plugin: LowPrecision, model: object, optimizer: Optimizer | None) -> None:
    """Check the optimizer's weights; take back what another precision left in one."""
    if optimizer is not None:  # else the DeepSpeed config has an optimizer, which takes every parameter
        plugin.see_optimizer(optimizer)
        check_optimizers(plugin, [optimizer])
    plugin.modules.note_check()


def _load(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Load a checkpoint; codes that were made from weights before it are stale."""
    loaded = original(*args, **kwargs)
    count_step()
    return loaded
