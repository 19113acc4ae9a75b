"""Lightning, from whichever of its two packages is there: ``lightning``, or ``pytorch_lightning`` (and its fabric).

Both hold the same code under other names, so every class of Lightning may exist twice in a process. One of the two is
the main one: the one that is imported already; ``lightning`` if neither is, or both are. The names below are those of
the main one; :func:`both` adds the class of the other.
"""

import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_utilities.core import overrides

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.fabric import cli as fabric_cli
    from lightning.fabric import strategies as fabric_strategies
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.plugins import DeepSpeedPrecision as FabricDeepSpeed
    from lightning.fabric.plugins import HalfPrecision as FabricHalf
    from lightning.fabric.plugins import MixedPrecision as FabricMixed
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch import callbacks as trainer_callbacks
    from lightning.pytorch import strategies as trainer_strategies
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import DeepSpeedPrecision as TrainerDeepSpeed
    from lightning.pytorch.plugins import HalfPrecision as TrainerHalf
    from lightning.pytorch.plugins import Precision as TrainerPrecision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.types import OptimizerLRScheduler


class Package(NamedTuple):
    """One of Lightning's two packages: what ``pip`` calls it, and the modules of the Trainer and of Fabric."""

    name: str
    trainer: str
    fabric: str

    @property
    def version(self) -> str:
        """The version, such as ``"2.6.6"``."""
        version: str = import_module(self.trainer).__version__
        return version

    def imported(self, *, for_trainer: bool) -> bool:
        """Return whether the Trainer's or Fabric's part is imported to its end."""
        name = f"{self.trainer}.trainer" if for_trainer else f"{self.fabric}.fabric"
        return hasattr(sys.modules.get(name), "Trainer" if for_trainer else "Fabric")

    def module(self, name: str) -> Any:
        """Return a module by its name in the other one: ``"fabric.strategies"`` or ``"pytorch.strategies"``."""
        part, _, rest = name.partition(".")
        top = self.fabric if part == "fabric" else self.trainer
        return import_module(f"{top}.{rest}" if rest else top)


PACKAGES: Final = (
    Package("lightning", "lightning.pytorch", "lightning.fabric"),
    Package("pytorch-lightning", "pytorch_lightning", "lightning_fabric"),
)


def _main() -> Package:
    for package in PACKAGES:
        if package.trainer in sys.modules or package.fabric in sys.modules:
            return package
    for package in PACKAGES:
        if find_spec(package.trainer.partition(".")[0]) is not None:
            return package
    raise ImportError(
        "lightning_lowprec needs Lightning, and neither of its packages is installed. Run"
        " `pip install 'lightning>=2.4.0,<2.7,!=2.6.2,!=2.6.3'`, or the same with `pytorch-lightning`."
    )


MAIN: Final = _main()

_PLACES: Final = {
    "Fabric": "fabric:Fabric",
    "fabric_cli": "fabric.cli",
    "fabric_strategies": "fabric.strategies",
    "CheckpointIO": "fabric.plugins:CheckpointIO",
    "ClusterEnvironment": "fabric.plugins:ClusterEnvironment",
    "FabricDeepSpeed": "fabric.plugins:DeepSpeedPrecision",
    "FabricHalf": "fabric.plugins:HalfPrecision",
    "FabricMixed": "fabric.plugins:MixedPrecision",
    "FabricPrecision": "fabric.plugins:Precision",
    "Callback": "pytorch:Callback",
    "LightningDataModule": "pytorch:LightningDataModule",
    "LightningModule": "pytorch:LightningModule",
    "Trainer": "pytorch:Trainer",
    "trainer_callbacks": "pytorch.callbacks",
    "trainer_strategies": "pytorch.strategies",
    "seed_everything": "pytorch:seed_everything",
    "LightningCLI": "pytorch.cli:LightningCLI",
    "LightningOptimizer": "pytorch.core.optimizer:LightningOptimizer",
    "TrainerDeepSpeed": "pytorch.plugins:DeepSpeedPrecision",
    "TrainerHalf": "pytorch.plugins:HalfPrecision",
    "TrainerPrecision": "pytorch.plugins:Precision",
    "TrainerFn": "pytorch.trainer.states:TrainerFn",
    "GradClipAlgorithmType": "pytorch.utilities:GradClipAlgorithmType",
    "MisconfigurationException": "pytorch.utilities.exceptions:MisconfigurationException",
    "OptimizerLRScheduler": "pytorch.utilities.types:OptimizerLRScheduler",
}
"""The module of each name above, and the attribute in it, by the names in ``lightning``."""


def _get(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = MAIN.module(module)
    globals()[name] = value = getattr(found, attribute) if attribute else found
    return value


if not TYPE_CHECKING:
    __getattr__ = _get  # hidden from mypy, which would take every name for Any


@cache  # cleared by `share_bases`
def both(*classes: object) -> tuple[Any, ...]:
    """Return classes of the main package, each with its namesake in the other package if that is imported."""
    return tuple(namesake for cls in classes for namesake in (cls, *_namesakes(cls)))


def _namesakes(cls: Any) -> Iterator[Any]:
    for part in ("trainer", "fabric"):
        own = getattr(MAIN, part)
        if f"{cls.__module__}.".startswith(f"{own}."):
            for package in PACKAGES:
                module = sys.modules.get(getattr(package, part) + cls.__module__.removeprefix(own))
                if package is not MAIN and hasattr(module, cls.__name__):
                    yield getattr(module, cls.__name__)


def _namesake(cls: Any, module: Any) -> Any:
    """Return a class of Lightning in the package of a class of LightningModule, for code that asks for its own."""
    known = both(_get("LightningModule"))
    index = next((index for index, owner in enumerate(known) if issubclass(module, owner)), 0)
    return both(cls)[index]


namesake: Any = cache(_namesake)  # asked in every step; cleared by `share_bases`


def share_bases() -> None:
    """Make our subclasses of Lightning's plugins and callbacks those of the other package too, if it is imported.

    Lightning asks for its own classes by ``isinstance``. What both packages define, is inherited from the main one.
    """
    both.cache_clear()
    namesake.cache_clear()
    callback, precision = _get("Callback"), _get("TrainerPrecision")
    others = {callback: both(callback)[1:], precision: both(precision)[1:] or both(_get("FabricPrecision"))[1:]}
    for base, namesakes in others.items():
        for cls in base.__subclasses__():
            if cls.__module__.startswith("lightning_lowprec."):
                rest = (b for b in cls.__bases__ if b is not base and b.__name__ != base.__name__)
                # Without: a Trainer of the other package refuses our plugins and callbacks: it asks by `isinstance`.
                # It can go when `lightning` and `pytorch_lightning` share their classes, or one of the two is no more.
                cls.__bases__ = (base, *namesakes, *rest)


def is_overridden(name: str, module: object) -> bool:
    """Return whether a LightningModule of either package has its own version of one of Lightning's methods."""
    bases = (cls for cls in both(_get("LightningModule")) if isinstance(module, cls))
    return any(overrides.is_overridden(name, module, cls) for cls in bases)


def is_wrapped(module: object) -> bool:
    """Return whether Fabric, of either package, has wrapped a module."""
    return any(
        package.module("fabric").is_wrapped(module) for package in PACKAGES if package.imported(for_trainer=False)
    )
