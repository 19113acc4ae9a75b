"""Make stock Lightning accept the names of this package in ``precision=``.

Both packages of Lightning are met (see :mod:`~lightning_lowprec.private.either`): what is imported now, and what is
imported later as soon as its first Trainer, Fabric or LightningCLI is made (see ``lightning_lowprec_autoload``). Nine
parts are patched, if Lightning has them (see :mod:`~lightning_lowprec.private.lightning`):

* the check of arguments in both connectors: a name of this package becomes ``precision=None`` and a plugin;
* the creation of the strategy in both connectors: the plugin gets its device, or the pair is refused. In Fabric the
  strategy then gives the optimizers and the wrapped module to the plugin. The Trainer gives them by ``connect``;
* the ``precision`` annotation of ``Trainer.__init__`` and ``Fabric.__init__``, which LightningCLI and ``--help`` read;
* the registration of communication hooks in DDPStrategy, which leaves ``fp8_gradient_hook`` out on CPU without a word;
* the errors of LightningCLI's parser, which then say what to write instead of an unknown precision, or what our plugin
  says of its arguments;
* ``convert_module`` of Lightning's plugins, which then warn of layers that this package has left in a model;
* ``clip_gradients_norm`` of Fabric's strategies, which then writes no float32 copies of the gradients where
  :mod:`~lightning_lowprec.masters.step` allows it;
* ``ModelSummary``, which then counts the bytes of parameters under these precisions;
* the throughput monitors, which then know the peak rates of these precisions.

If Lightning has moved one of the first two parts, importing warns that ``plugins=`` still works, and a name raises as
any word that Lightning does not know.
"""

import ast
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final, Literal, Union, final

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import lightning_lowprec_autoload as autoload
from lightning_lowprec import names, strategies
from lightning_lowprec.conversion import backends
from lightning_lowprec.extras import require
from lightning_lowprec.fsdp2.forward_hooks import reshard
from lightning_lowprec.masters import copies
from lightning_lowprec.masters.float32_values import NO_PLAIN_STEP
from lightning_lowprec.messages import info, not_finite, warn
from lightning_lowprec.numerics.fp8_average import fp8_gradient_hook
from lightning_lowprec.precision import plain
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.host import trainer_of
from lightning_lowprec.precision.step import clip_by_norm
from lightning_lowprec.private import lightning as private
from lightning_lowprec.private.either import PACKAGES, FabricPrecision, Package, TrainerFn, both, share_bases
from lightning_lowprec.zero import DEEPSPEED, bind

LAUNCHED_PRECISION: Final = "LOWPREC_RUN_PRECISION"
"""The variable in which ``lowprec run`` passes its precision, which wins over the script's."""

_said: set[tuple[str, ...]] = set()
"""For each precision of ``lowprec run`` that was used: what it has replaced."""
_THROUGHPUT: Final = {True: "pytorch.callbacks.throughput_monitor", False: "fabric.utilities.throughput"}
CONVERT = "convert_module"
"""The public method of precision plugins that is called once per set-up of a model."""

_patches: list[tuple[object, str, object, object]] = []
_at_meeting: list[Callable[[object], None]] = []
_annotations: list[tuple[dict[str, Any], Any]] = []
_met: dict[tuple[Package, bool], Any] = {}
"""The class Trainer (True) or Fabric (False) of each part of Lightning that is patched."""


def register() -> None:
    """Make the names of ``names.TABLE`` known to Lightning. Calling it again does nothing."""
    autoload.before_first_use(meet)
    meet()


def meet() -> None:
    """Register at the parts of Lightning that were imported since the last call."""
    share_bases()
    for package in PACKAGES:
        for for_trainer in (True, False):
            if package.imported(for_trainer=for_trainer) and (package, for_trainer) not in _met:
                _register_at(package, for_trainer)


def _register_at(package: Package, for_trainer: bool) -> None:
    part = package.module("pytorch" if for_trainer else "fabric")
    user = _met[package, for_trainer] = part.Trainer if for_trainer else part.Fabric
    for function in _at_meeting:
        function(user)
    problems = private.moved_connectors(package)
    if problems:
        warn(
            f"lightning_lowprec does not support {package.name} {package.version}: {', '.join(problems)} moved."
            " Its names are not available in `precision=`; `plugins=lightning_lowprec.FP8TorchAO()` still works.",
            stacklevel=4,
        )
        return
    connector = private.connector(package, for_trainer=for_trainer)
    _patch(connector, private.CHECK_CONFIG, _resolve_name, package=package, for_trainer=for_trainer)
    _patch(connector, private.LAZY_INIT, _meet_strategy, for_trainer=for_trainer)
    registry = private.strategy_registry(package, for_trainer=for_trainer)
    strategy = strategies.fsdp2_class(package, for_trainer=for_trainer)
    registry.register("fsdp2", strategy, "FSDP2, in every precision, with FP8 all-gather", override=True)
    _widen_annotations()
    for precision in _stock_precisions(part.__name__):
        _patch(precision, CONVERT, _warn_of_left_over)
    throughput = package.module(_THROUGHPUT[for_trainer])
    if hasattr(throughput, private.COMPUTE_DTYPE):
        _patch(throughput, private.COMPUTE_DTYPE, _compute_dtype)
    if not for_trainer:
        _patch(package.module("fabric.strategies").Strategy, "clip_gradients_norm", _clip_deferred)
        return
    ddp = package.module("pytorch.strategies").DDPStrategy
    if hasattr(ddp, private.DDP_NAMES[0]):
        _patch(ddp, private.DDP_NAMES[0], _register_on_cpu)
    _patch(package.module("pytorch.cli").LightningArgumentParser, "error", _say_names)
    _patch(package.module("pytorch.utilities.model_summary").ModelSummary, "__init__", _count_bytes)


def at_meeting(function: Callable[[object], None]) -> None:
    """Call ``function`` with every Trainer and Fabric class that is registered, now and later."""
    _at_meeting.append(function)
    for user in _met.values():
        function(user)


def unregister() -> None:
    """Put back everything that ``register`` changed, and torch's copies of parameters."""
    autoload.before_first_use(share_bases)
    copies.unpatch()
    while _patches:
        owner, name, original, replacement = _patches.pop()
        if getattr(owner, name) is replacement:  # else another package wrapped the patch
            setattr(owner, name, original)
    while _met:
        (package, for_trainer), _ = _met.popitem()
        private.strategy_registry(package, for_trainer=for_trainer).pop("fsdp2", None)
    while _annotations:
        annotations, original = _annotations.pop()
        annotations["precision"] = original


# ---- the patches


def _resolve_name(
    original: Callable[..., None],
    self: Any,
    *,
    package: Package,
    for_trainer: bool,
    precision: object,
    plugins: Any,
    strategy: object,
    **kwargs: object,
) -> None:
    precision, plugins = _launched(precision, plugins)
    given = _listed(plugins)
    for plugin in given:
        if isinstance(plugin, str):
            raise names.no_plugin(plugin)
        if type(plugin).__module__.startswith("accelerate."):
            raise TypeError(
                f"`plugins={type(plugin).__name__}(...)` is an object of Accelerate. Write `FP8TorchAO(recipe=...)`,"
                " `FP8TE('delayed', margin=...)` or `MSAMP('O2')`: docs/migration.md has every value."
            )
    ours = next((plugin for plugin in given if isinstance(plugin, LowPrecision)), None)
    if isinstance(precision, str) and precision in names.TABLE:
        other = next((plugin for plugin in given if isinstance(plugin, both(FabricPrecision))), None)
        if other is not None:
            raise ValueError(f"Received both `precision={precision}` and `plugins={other}`. Choose one.")
        ours = names.create(precision)
        given, precision = [*given, ours], None
    elif precision is not None:
        names.validate_name(precision)
    if strategies.is_fsdp2(strategy) and ours is None and (ours := strategies.half_under_fsdp2(precision)) is not None:
        given, precision = [*given, ours], None
    if ours is not None or strategies.is_fsdp2(strategy):
        strategy = strategies.resolve_strategy(strategy, package, for_trainer)
    if ours is not None:
        strategies.check_strategy(ours, strategy, private.strategy_registry(package, for_trainer=for_trainer))
        if isinstance(strategy, str) and strategy.startswith("deepspeed"):  # Lightning's error names no version
            require("deepspeed", f"`strategy={strategy!r}`")
    original(self, precision=precision, plugins=given or None, strategy=strategy, **kwargs)


def _launched(precision: object, plugins: object) -> tuple[object, object]:
    """Return the precision of ``lowprec run --precision=NAME``, if there is one, in place of the script's."""
    asked = os.environ.get(LAUNCHED_PRECISION)
    if asked is None:
        return precision, plugins
    several = _listed(plugins)
    replaced = [plugin for plugin in several if isinstance(plugin, (*both(FabricPrecision), str))]
    given = [f"precision={precision!r}"] if precision is not None and str(precision) != asked else []
    given += [f"plugins={plugin}" for plugin in replaced]
    if given and (asked, *given) not in _said:
        info(f"lowprec run: `--precision={asked}` wins over `{'` and `'.join(given)}` of the script.")
    _said.add((asked, *given))
    return asked, [plugin for plugin in several if plugin not in replaced]


def _listed(plugins: Any) -> list[Any]:
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    return [] if plugins is None else list(plugins) if several else [plugins]


def launched_precision_is_used() -> bool:
    """Return whether a Trainer or a Fabric was made with the precision of ``lowprec run`` in this process."""
    return bool(_said)


def _meet_strategy(original: Callable[..., None], self: Any, *, for_trainer: bool) -> None:
    original(self)
    plugin = self.precision_plugin if for_trainer else self.precision
    if strategies.is_fsdp2(self.strategy):  # checks early, before any process starts
        self.strategy.sharding.check(plugin)
    if not isinstance(plugin, LowPrecision):
        return
    strategies.check_strategy(plugin, self.strategy, {})
    plugin.bind_device(self.strategy.root_device)
    if isinstance(self.strategy, both(*DEEPSPEED)):
        bind(plugin, self.strategy)
        return
    if strategies.is_fsdp2(self.strategy):  # this strategy gives the optimizers to the plugin itself
        return
    if isinstance(self.strategy, both(*strategies.SHARDED)):
        plugin.bind_shards(reshard)
    if not for_trainer:
        self.strategy.setup_module = partial(_show_module, plugin, self.strategy.setup_module)
        self.strategy.setup_optimizer = partial(_show_optimizer, plugin, self.strategy.setup_optimizer)


def _register_on_cpu(original: Callable[[Any], None], self: Any) -> None:
    original(self)
    if self.root_device.type == "cpu" and private.comm_hook(self) is fp8_gradient_hook:
        private.register_comm_hook(self)


def _stock_precisions(part: str) -> list[Any]:
    classes: list[Any] = list(both(FabricPrecision))
    for cls in classes:
        classes.extend(sub for sub in cls.__subclasses__() if sub not in classes)
    return [cls for cls in classes if CONVERT in vars(cls) and f"{cls.__module__}.".startswith(f"{part}.")]


def _warn_of_left_over(original: Callable[..., Any], self: Any, module: Any) -> Any:
    run = f"under `precision={self.precision!r}`"
    plain.warn_of_layers(module, run)
    if self.precision == "32-true" or str(self.precision).endswith("-mixed"):
        plain.warn_of_half_weights(module, run)
    for p in module.parameters():
        vars(p).pop(NO_PLAIN_STEP, None)
    trainer = trainer_of(module)  # maybe of an earlier run; now Fabric runs it
    if trainer is None or trainer.precision_plugin is not self or trainer.state.fn == TrainerFn.FITTING:
        plain.forget(module)  # how weights were rounded: they change now
    return original(self, module)


def _show_optimizer(plugin: LowPrecision, original: Callable[[Optimizer], object], optimizer: Optimizer) -> object:
    plugin.see_optimizer(optimizer)
    return original(optimizer)


def _show_module(plugin: LowPrecision, original: Callable[[object], Module], module: object) -> Module:
    wrapped = original(module)
    plugin.see_module(wrapped)
    return wrapped


def _say_names(original: Callable[..., None], self: Any, message: str, *args: object, **kwargs: object) -> None:
    """Replace the parser's usage and list of types where a name is unknown, or one of our classes refuses a value."""
    key = re.match(r'Parser key "([\w.]*\b(?:precision|plugins|strategy))"', message)
    value = re.search(r"Given value: (.*)$", message)
    if key and value:
        answer = names.unknown_name(value[1]) if key[1].endswith("precision") else _refusal_of_class(value[1])
        if answer is not None:
            message = f"{key[1]}: {answer}"
            if self.exit_on_error and not os.environ.get("JSONARGPARSE_DEBUG"):
                self.exit(2, f"error: {message}\n")
    original(self, message, *args, **kwargs)


@final
class _NamespacesToDicts(ast.NodeTransformer):
    """Write ``{'a': 1}`` for ``Namespace(a=1)``, as a parser prints the entries that it has accepted."""

    def visit_Call(self, node: ast.Call) -> ast.Dict:
        self.generic_visit(node)
        return ast.Dict([ast.Constant(word.arg) for word in node.keywords], [word.value for word in node.keywords])


def _refusal_of_class(value: str) -> Exception | None:
    """Return what the constructor of one of our classes says of its arguments in ``value``, a printed config."""
    try:
        given = ast.literal_eval(_NamespacesToDicts().visit(ast.parse(value, mode="eval")))
    except (ValueError, SyntaxError):
        return None
    public = sys.modules[__name__.partition(".")[0]]
    for config in given if isinstance(given, list) else [given]:
        package, _, name = str(config.get("class_path") if isinstance(config, dict) else "").rpartition(".")
        if package == public.__name__ and name in public.__all__:
            try:
                getattr(public, name)(**config.get("init_args", {}))
            except (ValueError, TypeError, ImportError) as error:
                return error
    return None


def _clip_deferred(
    original: Callable[..., Tensor],
    self: Any,
    module: Module,
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
) -> Tensor:
    norm = None
    if isinstance(self.precision, LowPrecision):
        norm = clip_by_norm(self.precision.scaler, optimizer, max_norm, norm_type)
    if norm is None:
        return original(self, module, optimizer, max_norm, norm_type, error_if_nonfinite)
    if error_if_nonfinite and not norm.isfinite():
        raise not_finite(norm_type)
    return norm


def _count_bytes(original: Callable[..., None], self: Any, model: Any, *args: object, **kwargs: object) -> None:
    if not isinstance(private.precision_plugin_of(model), LowPrecision):
        return original(self, model, *args, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
        original(self, model, *args, **kwargs)
    if self.total_parameters:
        total_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not is_lazy(p))
        private.set_bytes_per_parameter(self, total_bytes / self.total_parameters)


def _compute_dtype(original: Callable[..., object], plugin: object) -> object:
    return plugin.peak_rate_dtype if isinstance(plugin, LowPrecision) else original(plugin)


# ---- patching


def _patch(owner: type | ModuleType, name: str, function: Callable[..., object], **facts: object) -> None:
    """Call ``function(original, ...)`` in place of a function of Lightning, as long as this package is registered."""
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> object:
        return function(original, *args, **facts, **kwargs) if _patches else original(*args, **kwargs)

    setattr(owner, name, replacement)
    _patches.append((owner, name, original, replacement))


def _widen_annotations() -> None:
    ours = Literal[tuple(names.TABLE)]  # type: ignore[valid-type]
    for owner in _met.values():
        function: Any = owner.__init__
        while function is not None:
            annotations = function.__annotations__
            if "precision" in annotations:
                seen = next((original for known, original in _annotations if known is annotations), None)
                if seen is None:
                    _annotations.append((annotations, annotations["precision"]))
                original = autoload.without_word(annotations["precision"] if seen is None else seen)
                annotations["precision"] = Union[original, ours]  # noqa: UP007  # may be a string, which `|` refuses
            function = getattr(function, "__wrapped__", None)


backends.on_change(_widen_annotations)
