"""What the files of this room read of a precision plugin; `base.py`, which has the plugin, imports these files."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion.head import HeadKind
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.masters.weights import HalfWeights
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.precision.host import Engine
from lightning_lowprec.references import WeakList
from lightning_lowprec.runs_where import RecipeKey


class Plugin(Protocol):
    """See :class:`~lightning_lowprec.precision.base.LowPrecision`, which has them all."""

    precision: str
    backend: ClassVar[str | None]
    format: ClassVar[str]
    plan: Plan | None
    head: HeadKind
    emulate: Emulation | None
    plain_after_fit: bool
    masters: HalfWeights | None
    engine: Engine | None
    reshard: Callable[[Module], None] | None
    optimizers: WeakList[Optimizer]
    modules: Any
    """A ``set_up.Modules``."""
    after_fit: Any
    """A ``plain.AfterFit``."""
    _in_trainer: bool
    _will_train: bool

    @property
    def autocast_dtype(self) -> torch.dtype: ...  # noqa: D102

    @property
    def hardware_recipe(self) -> RecipeKey | None: ...  # noqa: D102

    def refusal(self, device: torch.device) -> str | None: ...  # noqa: D102

    def _converted_layers(self, module: Module) -> Iterable[Module]: ...

    def _prepare_optimizer(self, optimizer: Optimizer) -> None: ...

    def _prepare_weights_of(self, optimizer: Optimizer) -> None: ...
