"""Make stock Lightning accept the names of this package in ``precision=``.

Nine parts of Lightning are patched, if Lightning has them (see :mod:`~lightning_lowprec.private.lightning`):

* the check of arguments in the connectors of Trainer and Fabric, which runs after ``LT_PRECISION`` and
  ``PL_TRAINER_PRECISION`` are read. A name of this package becomes ``precision=None`` and a plugin among ``plugins``;
* the creation of the strategy in both connectors. The plugin gets its device, or the pair of plugin and strategy is
  refused. In Fabric, ``setup_optimizer`` and ``setup_module`` of the strategy then give the optimizers and the wrapped
  module to the plugin. The Trainer gives them by ``connect``;
* the ``precision`` annotation of ``Trainer.__init__`` and ``Fabric.__init__``, which LightningCLI and ``--help`` read;
* the registration of communication hooks in DDPStrategy, which leaves them out on CPU without a word: there
  ``fp8_gradient_hook`` is registered too;
* the errors of LightningCLI's parser, which then say what to write instead of an unknown precision;
* ``convert_module`` of Lightning's own precision plugins, which then warn of layers that this package has left in a
  model;
* ``clip_gradients_norm`` of Fabric's strategies, which then clips without writing float32 copies of the gradients
  where :mod:`~lightning_lowprec.masters.deferred` allows it;
* ``ModelSummary``, which then counts the bytes of parameters under these precisions;
* the throughput monitors, which then know the peak rates of these precisions.

If Lightning has moved one of the first two parts, importing warns, and a name raises: the error says that ``plugins=``
still works.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final, Literal, Union

import lightning
import lightning.fabric.utilities.throughput as fabric_throughput
import lightning.pytorch.callbacks.throughput_monitor as trainer_throughput
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_lowprec import names, recipes
from lightning_lowprec.conversion import backends
from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy
from lightning_lowprec.fsdp2.forward_hooks import reshard
from lightning_lowprec.fsdp2.trainer import FSDP2Strategy
from lightning_lowprec.numerics.fp8_average import fp8_gradient_hook
from lightning_lowprec.precision import plain
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.step import clip_by_norm
from lightning_lowprec.private import lightning as private
from lightning_lowprec.strategies import (
    SHARDED,
    check_comm_hook,
    check_strategy,
    half_under_fsdp2,
    is_fsdp2,
    resolve_strategy,
)
from lightning_lowprec.zero.engine import DEEPSPEED, bind

STRATEGIES = {True: FSDP2Strategy, False: FabricFSDP2Strategy}
"""The class of ``strategy="fsdp2"``; the key is True for the Trainer, False for Fabric."""

LAUNCHED_PRECISION: Final = "LOWPREC_RUN_PRECISION"
"""The variable in which ``lowprec run`` passes its precision, which wins over the script's."""

_said: set[tuple[str, ...]] = set()
"""For each precision of ``lowprec run`` that was used: what it has replaced."""
CONVERT = "convert_module"
"""The public method of precision plugins that is called once per set-up of a model."""

_patches: list[tuple[Any, str, Any, Any]] = []
_annotations: list[tuple[dict[str, Any], Any]] = []


def register() -> None:
    """Make the names of ``names.TABLE`` known to Lightning. Calling it again does nothing."""
    if _patches:
        return
    problems = private.moved_connectors()
    if problems:
        warnings.warn(_moved_message(problems), stacklevel=3)
        for owner in (lightning.Fabric, lightning.Trainer):
            _patch(owner, "__init__", lambda original: _refuse_names(original, problems))
        return
    for for_trainer, strategy in STRATEGIES.items():
        connector = private.connector(for_trainer=for_trainer)
        _patch(connector, private.CHECK_CONFIG, partial(_resolve_name, for_trainer=for_trainer))
        _patch(connector, private.LAZY_INIT, partial(_meet_strategy, for_trainer=for_trainer))
        registry = private.strategy_registry(for_trainer=for_trainer)
        registry.register("fsdp2", strategy, "FSDP2, in every precision, with FP8 all-gather", override=True)
    _widen_annotations()
    if hasattr(trainer_strategies.DDPStrategy, private.DDP_NAMES[0]):
        _patch(trainer_strategies.DDPStrategy, private.DDP_NAMES[0], _register_on_cpu)
    _patch(LightningArgumentParser, "error", _say_names)
    for precision in _stock_precisions():
        _patch(precision, CONVERT, _warn_of_left_over)
    _patch(FabricStrategy, "clip_gradients_norm", _clip_deferred)
    _patch(ModelSummary, "__init__", _count_bytes)
    for module in (fabric_throughput, trainer_throughput):
        if hasattr(module, private.COMPUTE_DTYPE):
            _patch(module, private.COMPUTE_DTYPE, _compute_dtype)


def unregister() -> None:
    """Put back everything that ``register`` changed."""
    while _patches:
        owner, name, original, replacement = _patches.pop()
        if getattr(owner, name) is replacement:  # else another package wrapped the patch
            setattr(owner, name, original)
    for for_trainer in STRATEGIES:
        private.strategy_registry(for_trainer=for_trainer).pop("fsdp2", None)
    while _annotations:
        annotations, original = _annotations.pop()
        annotations["precision"] = original


# ---- the patches


def _resolve_name(original: Callable[..., None], *, for_trainer: bool) -> Callable[..., None]:
    @wraps(original)
    def check(self: Any, *, precision: Any, plugins: Any, strategy: Any, **kwargs: Any) -> None:
        if not _patches:
            return original(self, precision=precision, plugins=plugins, strategy=strategy, **kwargs)
        precision, plugins = _launched(precision, plugins)
        known = private.strategy_names(self)
        _refuse_strings(plugins)
        given = [] if plugins is None else list(plugins) if isinstance(plugins, Iterable) else [plugins]
        given = [recipes.plugin_of(plugin) or plugin for plugin in given]
        ours = next((plugin for plugin in given if isinstance(plugin, LowPrecision)), None)
        if isinstance(precision, str) and precision in names.TABLE:
            other = next((plugin for plugin in given if isinstance(plugin, Precision)), None)
            if other is not None:
                raise ValueError(f"Received both `precision={precision}` and `plugins={other}`. Choose one.")
            strategy = resolve_strategy(strategy, known, for_trainer)
            ours = names.create(precision)
            given, precision = [*given, ours], None
        elif precision is not None:
            names.validate_name(precision)
        if is_fsdp2(strategy) and ours is None and half_under_fsdp2(precision) is not None:
            ours = half_under_fsdp2(precision)
            given, precision = [*given, ours], None
        if ours is not None or is_fsdp2(strategy):
            strategy = resolve_strategy(strategy, known, for_trainer)
        if ours is not None:
            check_strategy(ours, strategy, known, private.strategy_registry(for_trainer=for_trainer))
        original(self, precision=precision, plugins=given or None, strategy=strategy, **kwargs)

    return check


def _refuse_strings(plugins: Any) -> None:
    for plugin in (plugins,) if isinstance(plugins, str) else plugins if isinstance(plugins, (list, tuple)) else ():
        if isinstance(plugin, str):
            raise names.no_plugin(plugin, private.precision_names())


def _launched(precision: Any, plugins: Any) -> tuple[Any, Any]:
    """Return the precision of ``lowprec run --precision=NAME``, if there is one, in place of the script's."""
    asked = os.environ.get(LAUNCHED_PRECISION)
    if asked is None:
        return precision, plugins
    several = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    replaced = [plugin for plugin in several if isinstance(plugin, (Precision, str))]
    given = [f"precision={precision!r}"] if precision is not None and str(precision) != asked else []
    given += [f"plugins={plugin}" for plugin in replaced]
    if given and (asked, *given) not in _said:
        rank_zero_info(f"lowprec run: `--precision={asked}` wins over `{'` and `'.join(given)}` of the script.")
    _said.add((asked, *given))
    return asked, [plugin for plugin in several if plugin is not None and plugin not in replaced]


def launched_precision_is_used() -> bool:
    """Return whether a Trainer or a Fabric was made with the precision of ``lowprec run`` in this process."""
    return bool(_said)


def _meet_strategy(original: Callable[..., None], *, for_trainer: bool) -> Callable[..., None]:
    @wraps(original)
    def lazy_init(self: Any) -> None:
        original(self)
        plugin = getattr(self, "precision_plugin", None) or getattr(self, "precision", None)
        if _patches and is_fsdp2(self.strategy):  # checks early, before any process starts
            self.strategy.sharding.check(plugin)
        if _patches and isinstance(plugin, LowPrecision):
            check_strategy(plugin, self.strategy, (), {})
            plugin.bind_device(self.strategy.root_device)
            if isinstance(self.strategy, DEEPSPEED):
                bind(plugin, self.strategy)
                return
            if is_fsdp2(self.strategy):  # this strategy gives the optimizers to the plugin itself
                return
            if isinstance(self.strategy, SHARDED):
                plugin.bind_shards(reshard)
            check_comm_hook(plugin, private.comm_hook(self.strategy))
            if not for_trainer:
                self.strategy.setup_module = partial(_show_module, plugin, self.strategy.setup_module)
                self.strategy.setup_optimizer = partial(_show_optimizer, plugin, self.strategy.setup_optimizer)

    return lazy_init


def _register_on_cpu(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def register_hooks(self: Any) -> None:
        original(self)
        if _patches and self.root_device.type == "cpu" and private.comm_hook(self) is fp8_gradient_hook:
            private.register_comm_hook(self)

    return register_hooks


def _stock_precisions() -> list[type[Precision]]:
    """Return the classes of Lightning's own precision plugins that define ``convert_module``."""
    found: list[type[Precision]] = [Precision]
    for cls in found:
        found.extend(c for c in cls.__subclasses__() if c.__module__.startswith("lightning.") and c not in found)
    return [cls for cls in found if CONVERT in vars(cls)]


def _warn_of_left_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def convert_module(self: Any, module: Any) -> Any:
        if _patches and not isinstance(self, LowPrecision):
            run = f"under `precision={self.precision!r}`"
            plain.warn_at_first_forward(module, run)
            if self.precision == "32-true" or str(self.precision).endswith("-mixed"):
                plain.warn_of_half_weights(module, run)
        return original(self, module)

    return convert_module


def _show_optimizer(plugin: LowPrecision, original: Callable[[Any], Any], optimizer: Any) -> Any:
    plugin.see_optimizer(optimizer)
    return original(optimizer)


def _show_module(plugin: LowPrecision, original: Callable[[Any], Any], module: Any) -> Any:
    wrapped = original(module)
    plugin.see_module(wrapped)
    return wrapped


def _say_names(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the parser's list of types, which names no remedy, where the value of a ``precision`` is unknown."""

    @wraps(original)
    def error(self: Any, message: str, *args: Any, **kwargs: Any) -> None:
        key = re.match(r'Parser key "([\w.]*\bprecision)"', message)
        value = re.search(r"Given value: (.*)$", message)
        if _patches and key and value:
            message = f"{key[1]}: {names.unknown_name(value[1], private.precision_names())}"
        original(self, message, *args, **kwargs)

    return error


def _clip_deferred(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def clip(
        self: Any,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        norm = None
        if _patches and isinstance(self.precision, LowPrecision):
            norm = clip_by_norm(self.precision.scaler, optimizer, max_norm, norm_type)
        if norm is None:
            return original(self, module, optimizer, max_norm, norm_type, error_if_nonfinite)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped. Set"
                " `error_if_nonfinite=False` to go on."
            )
        return norm

    return clip


def _count_bytes(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not _patches or not isinstance(private.precision_plugin_of(model), LowPrecision):
            return original(self, model, *args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
            original(self, model, *args, **kwargs)
        if self.total_parameters:
            total_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not is_lazy(p))
            private.set_bytes_per_parameter(self, total_bytes / self.total_parameters)

    return init


def _compute_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def compute_dtype(plugin: Any) -> Any:
        return plugin.peak_rate_dtype if _patches and isinstance(plugin, LowPrecision) else original(plugin)

    return compute_dtype


# ---- patching


def _patch(owner: type | ModuleType, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    replacement = make(original)
    setattr(owner, name, replacement)
    _patches.append((owner, name, original, replacement))


def _widen_annotations() -> None:
    """Add the names of the table to the annotation of ``precision``, which LightningCLI and ``--help`` read."""
    ours = Literal[tuple(names.TABLE)]  # type: ignore[valid-type]
    for owner in (lightning.Fabric, lightning.Trainer):
        function: Any = owner.__init__
        while function is not None:
            annotations = function.__annotations__
            if "precision" in annotations:
                seen = next((original for known, original in _annotations if known is annotations), None)
                if seen is None:
                    _annotations.append((annotations, annotations["precision"]))
                original = annotations["precision"] if seen is None else seen
                annotations["precision"] = Union[original, ours]  # noqa: UP007  # may be a string, which `|` refuses
            function = getattr(function, "__wrapped__", None)


def _widen_again() -> None:
    if _patches:
        _widen_annotations()


backends.on_change(_widen_again)


def _moved_message(problems: list[str]) -> str:
    return (
        f"lightning_lowprec does not support lightning {lightning.__version__}:"
        f" {', '.join(problems)} moved."
        " Its names are not available in `precision=`; `plugins=lightning_lowprec.FP8TorchAO()` still works."
    )


def _refuse_names(original: Callable[..., None], problems: list[str]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        precision = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments.get("precision")
        if _patches and isinstance(precision, str) and precision in names.TABLE:
            raise RuntimeError(f"`precision={precision!r}` is not available. {_moved_message(problems)}")
        original(self, *args, **kwargs)

    return init
