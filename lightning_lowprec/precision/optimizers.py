"""The optimizers that a plugin knows, and the check that they hold the weights that train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import final

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.membership import check_converted
from lightning_lowprec.numerics.parameters import disable_foreach
from lightning_lowprec.precision.frozen_writes import FrozenWrites
from lightning_lowprec.precision.modules import Modules
from lightning_lowprec.references import alive


@final
class Optimizers:
    """The optimizers that Fabric has set up one by one; the Trainer hands over all of them at once."""

    def __init__(self) -> None:
        self._added: list[weakref.ref[Optimizer]] = []
        self.frozen_writes = FrozenWrites()
        self.reshard: Callable[[Module], None] | None = None
        """Frees the gathered weights of a module under FSDP2, so that ``parameters()`` shows the shards."""

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer."""
        self._added.append(weakref.ref(optimizer))

    @property
    def known(self) -> list[Optimizer]:
        """The optimizers that were added and still exist."""
        return alive(self._added)

    @property
    def any_added(self) -> bool:
        """Whether an optimizer was ever added; Fabric adds none if the user gave ``plugins=`` instead of a name."""
        return bool(self._added)

    def make_plain(self, optimizer: Optimizer, *, except_for: str | None) -> None:
        """Undo what other backends did to an optimizer, and let the optimizer step parameters of several meshes."""
        backends.revert_optimizer(optimizer, except_for=except_for)
        if disable_foreach(optimizer):
            name = type(optimizer).__name__
            rank_zero_info(f"{name} runs without foreach: some of its parameters are DTensors, or of another mesh.")

    def check(
        self, modules: Modules, optimizers: list[Optimizer], layers_of: Callable[[Module], Iterable[Module]]
    ) -> None:
        """Warn if a trainable weight of a converted layer is in no optimizer; raise if an optimizer holds a stale one.

        Args:
            modules: the modules of the plugin.
            optimizers: all known optimizers.
            layers_of: finds the converted layers of a module.

        Raises:
            RuntimeError: the message names the weight that was replaced.
        """
        if self.reshard is not None:
            for module in modules.prepared:
                self.reshard(module)
        for warning in check_converted(modules.prepared, modules.unchecked, optimizers, layers_of):
            rank_zero_warn(warning)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the optimizers, which stay in their process."""
        return {**self.__dict__, "_added": [], "reshard": None}
