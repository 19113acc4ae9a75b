"""Make Lightning accept the names of lightning_lowprec without an import of it.

torch calls :func:`install` at the end of ``import torch``, by the entry point in ``lightning_lowprec_entry``, of the
group ``torch.backends``: ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches all of these off, ``LOWPREC_AUTOLOAD=0`` this
one. It puts a finder in front of the modules of Lightning that read ``precision=``, and does nothing else:
lightning_lowprec is imported when the first Trainer or Fabric gets a word that Lightning does not know, or when the
first LightningCLI is made.

Clients that check ``precision`` by the type in Lightning's connector find a type there that takes our words too
(:class:`Word`).

Lightning calls :func:`monitor` for every Trainer, by its own groups of entry points and the same file.

This file stands outside of the package, and imports neither the package nor torch, since it runs in every process that
imports torch.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SWITCH: Final = "LOWPREC_AUTOLOAD"
"""The variable that switches this file off where it is ``"0"``."""
LOGGER: Final = "lightning_lowprec"
"""The logger of all lines of this package."""
MONITOR: Final = "LOWPREC_MONITOR"
"""The variable that gives every Trainer a monitor that samples every so many optimizer steps."""
_READERS: Final = {
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.pytorch.cli": "LightningArgumentParser",
    "pytorch_lightning.cli": "LightningArgumentParser",
    "lightning.fabric.cli": "_run",
    "lightning_fabric.cli": "_run",
}
"""The modules of Lightning that read ``precision=``, each with the class or the command that does it."""
_LOSSY: Final = {
    "lightning.pytorch.plugins.precision.half": ("HalfPrecision", "connect"),
    "pytorch_lightning.plugins.precision.half": ("HalfPrecision", "connect"),
    "lightning.fabric.plugins.precision.half": ("HalfPrecision", "optimizer_step"),
    "lightning_fabric.plugins.precision.half": ("HalfPrecision", "optimizer_step"),
    "lightning.pytorch.plugins.precision.fsdp": ("FSDPPrecision", "connect"),
    "pytorch_lightning.plugins.precision.fsdp": ("FSDPPrecision", "connect"),
    "lightning.fabric.plugins.precision.fsdp": ("FSDPPrecision", "optimizer_step"),
    "lightning_fabric.plugins.precision.fsdp": ("FSDPPrecision", "optimizer_step"),
}
"""The modules of Lightning's precisions with half weights, each with the class and its method that gets optimizers."""
_LOST: Final = {
    "bf16-true": ("1/512 of its weight", "bf16-remainder", "2 bytes"),
    "16-true": ("1/4096 of its weight", "fp16-master", "4 bytes"),
}
"""The smallest update that half weights may keep, our name that keeps all of them, and its price per parameter."""
_TYPE: Final = "_PRECISION_INPUT"
"""The type of ``precision`` in Fabric's connector, which clients import for their own configuration."""
_STOCK: Final = ("_PRECISION_INPUT_STR", "_PRECISION_INPUT_STR_ALIAS", "_PRECISION_INPUT_INT")

_NOT_USED: Final = {
    "torchao": ("Failed to load ",),
    "torch.utils._pytree": ("<enum 'KernelPreference'> ", "<enum 'ScaleCalculationMode'> "),
}
"""Loggers, and the beginnings of what they say while torchao is imported: of kernels and Enums that we do not use."""

installed_by_torch = False
"""Whether torch has called :func:`install`."""
_first_use: Callable[[], None] | None = None
_told: set[str] = set()
"""The precision that was the reason of the line about lost updates."""


def install() -> None:
    """Watch the modules of Lightning; for torch, whose import survives an error here (``lightning_lowprec_entry``)."""
    global installed_by_torch
    if os.environ.get(SWITCH) == "0":
        return
    _put_finder()
    installed_by_torch = True


def info(line: str) -> None:
    """Log a line of this package at level INFO, on rank 0."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logger.level or logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # else those show the line
        logger.addHandler(handler)
    if is_rank_zero():
        logger.info(line, stacklevel=2)


def is_rank_zero() -> bool:
    """Return whether Lightning, whose two packages share this rank, takes this process for the first one now."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


def monitor() -> list[Any]:
    """Return the callbacks that Lightning gives every Trainer, by the variable :data:`MONITOR`.

    Raises:
        ValueError: the variable is no number of steps.
    """
    steps = os.environ.get(MONITOR, "")
    if not steps:
        return []
    if not steps.isdecimal() or int(steps) == 0:
        raise ValueError(f"{MONITOR}={steps!r} is not valid; expected a number of optimizer steps, such as 100.")
    from lightning_lowprec.callbacks import NumericsMonitor

    return [NumericsMonitor(every=int(steps))]


def before_first_use(function: Callable[[], None]) -> None:
    """Let ``function`` run before each object that reads ``precision=`` is made; for lightning_lowprec itself."""
    global _first_use
    _put_finder()
    _first_use = function


def _put_finder() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for logger in _NOT_USED:
            logging.getLogger(logger).addFilter(_is_shown)
        for module in [sys.modules[name] for name in (*_READERS, *_LOSSY) if name in sys.modules]:
            _watch(module)


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOT_USED[record.name])


class _Finder:
    """Finds the modules of both tables as Python would, and looks at each as soon as it is executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _READERS and name not in _LOSSY:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _watch(module)

            loader.exec_module = exec_module
        return spec


def _watch(module: ModuleType) -> None:
    """Let the module's command take our names; let every object of its class first call :data:`_first_use`, or look."""
    if module.__name__ in _LOSSY:
        _tell_of_lost_updates(module)
        return
    if module.__name__.endswith("fabric.connector") and hasattr(module, _TYPE):
        setattr(module, _TYPE, getattr(module, _TYPE) | Annotated[str, Word()])
    reader: Any = getattr(module, _READERS[module.__name__], None)
    for option in getattr(reader, "params", ()):
        _let_pass(option)
    if not isinstance(reader, type):
        return
    cls: Any = reader
    original = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _first_use is not None:
            _first_use()
        elif cls.__name__ == "LightningArgumentParser" or _asks(kwargs, module):
            _load()
        original(self, *args, **kwargs)

    __init__.__wrapped__ = original  # type: ignore[attr-defined]  # as functools.wraps does
    cls.__init__ = __init__


def _tell_of_lost_updates(module: ModuleType) -> None:
    """Let Lightning's precision with half weights say one line per process, in its first training."""
    name, method = _LOSSY[module.__name__]
    cls: Any = getattr(module, name, None)
    original = getattr(cls, method, None)
    if original is None:
        return

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _told and os.environ.get(SWITCH) != "0":
            optimizers = args[1] if method == "connect" and len(args) > 1 else args[:1]
            _tell(getattr(self, "precision", None), optimizers)
        return original(self, *args, **kwargs)

    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(cls, method, replacement)


def _tell(precision: Any, optimizers: Any) -> None:
    trained = (
        p
        for optimizer in optimizers
        if type(optimizer).__module__.startswith("torch.")  # others may keep masters or round at random
        for group in optimizer.param_groups
        for p in group["params"]
    )
    if precision not in _LOST or not any(p.requires_grad and p.element_size() == 2 for p in trained):
        return
    _told.add(precision)
    lost, name, price = _LOST[precision]
    info(
        f"precision={precision!r} steps half-precision weights, and loses every update below {lost}."
        f" precision={name!r} of lightning_lowprec keeps all of them, for {price} per parameter."
        f" {SWITCH}=0 silences this line."
    )


class Word:
    """The annotation of a string for ``precision=`` that is not Lightning's; pydantic asks it how to check a value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(_check_word, handler(source))


def without_word(annotation: Any) -> Any:
    """Return the type of ``precision`` without :class:`Word`, for parsers that list all choices."""
    stock = tuple(part for part in get_args(annotation) if not isinstance(getattr(part, "__metadata__", [0])[0], Word))
    return Union[stock] if stock else annotation  # noqa: UP007  # several parts


def _check_word(word: str) -> str:
    """Return a name of this package; ValueError, with the nearest name, for every other word."""
    _load()
    names = sys.modules.get("lightning_lowprec.names")
    if names is None:
        raise ValueError("lightning_lowprec cannot be imported, so its names are unknown")
    names.validate_name(word)
    return word


def _let_pass(option: Any) -> None:
    """Let an option of ``fabric run`` also take the names of lightning_lowprec."""
    convert = option.type.convert

    def convert_any(value: Any, *more: Any) -> Any:
        try:
            return convert(value, *more)
        except Exception:  # of click, which is imported where this runs
            _load()
            if value not in _added(option.name):
                raise
            return value

    option.type.convert = convert_any


def _added(option: str) -> Container[str]:
    if option == "strategy":
        return ("fsdp2",)
    names = sys.modules.get("lightning_lowprec.names")
    return () if names is None or option != "precision" else names.TABLE


def _asks(kwargs: dict[str, Any], module: ModuleType) -> bool:
    """Return whether a connector gets a word that is not Lightning's own, as an argument or by a variable."""
    precisions = [kwargs.get("precision"), os.environ.get("LT_PRECISION")]
    strategies = [kwargs.get("strategy"), os.environ.get("LT_STRATEGY")]
    fabric = "lightning.fabric" if module.__name__.startswith("lightning.") else "lightning_fabric"
    inputs = sys.modules.get(f"{fabric}.plugins.precision.precision")
    stock = {str(word) for group in _STOCK for word in get_args(getattr(inputs, group, None))}
    return "fsdp2" in strategies or not stock.issuperset(word for word in precisions if isinstance(word, str))


def _load() -> None:
    """Import lightning_lowprec, which makes its names known; if it cannot be imported, say so once."""
    global _first_use
    try:
        import lightning_lowprec  # noqa: F401
    except Exception as error:
        _first_use = lambda: None  # noqa: E731
        warnings.warn(f"lightning_lowprec cannot be imported, so its names are unknown: {error!r}", stacklevel=4)
