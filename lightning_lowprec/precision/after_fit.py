"""Hand a model back when the Trainer is done: as the Tuner found it, or plain."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.masters.float32_weights import Float32Weights
from lightning_lowprec.masters.in_backward import forget_updates
from lightning_lowprec.precision.plain import take_back
from lightning_lowprec.private.lightning import is_tuning
from lightning_lowprec.references import alive


@final
class AfterFit:
    """The tensors and optimizers of one run of the Trainer, to undo what the precision has done to them.

    A search of the Tuner is a run whose weights are restored from a checkpoint. The checkpoint holds weights that were
    rounded already, so the tensors from before the set-up are kept, on the CPU.
    """

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def begin(self, module: Module, trainer: Any) -> None:
        """Remember the tensors of ``module`` before it is set up, if the Tuner searches."""
        if trainer is not None and is_tuning(trainer):
            self._before = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]

    def keep_changed(self) -> None:
        """Forget the tensors whose dtype and class the set-up has left alone: the checkpoint has them exactly."""
        if self._before is not None:
            self._before = [
                (t, data.cpu()) for t, data in self._before if (t.dtype, type(t.data)) != (data.dtype, type(data))
            ]

    def end(self, modules: Iterable[Module], *, plain: bool, trained: bool) -> None:
        """Hand ``modules`` back.

        Args:
            modules: those that were set up.
            plain: give them torch's layers and float32 weights.
            trained: whether the run was a ``fit``.
        """
        before, self._before = self._before, None
        weights = Float32Weights()
        for module in modules:
            if trained:
                forget_updates(module.parameters())  # else a loop after the run would still update by its optimizer
            if before is not None or (plain and trained):
                take_back(module)
                weights.make(module)
        for tensor, data in before or ():
            tensor.grad = None
            tensor.data = data.to(tensor.device)
        if before is not None or (plain and trained):
            for optimizer in alive(self.optimizers):
                backends.revert_optimizer(optimizer)
                weights.follow(optimizer)

    def __repr__(self) -> str:
        """Show the class alone: there are no options."""
        return f"{type(self).__name__}()"

    def __getstate__(self) -> dict[str, object]:
        """Leave out tensors and optimizers, which stay in their process."""
        return {"optimizers": [], "_before": None}
