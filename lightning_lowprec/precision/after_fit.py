"""Hand a model back plain when the Trainer is done: torch's own layers, and float32 weights with the masters' values.

    before set-up    fit, test ...                     after
    nn.Linear   ->   FP8Linear, bf16 weight, master -> nn.Linear, the master's value in the same Parameter

An evaluation gives half-precision weights the float32 values from before, where nobody has written to the weights. A
search of the Tuner leaves all tensors as before.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.masters.in_backward import forget_updates
from lightning_lowprec.masters.registry import existing_masters
from lightning_lowprec.masters.weights import Float32Weights, is_marked
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import reconcile, upper_half
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.precision.plain import take_back
from lightning_lowprec.private.either import Trainer, TrainerFn
from lightning_lowprec.private.lightning import is_tuning
from lightning_lowprec.references import alive


@final
class AfterFit:
    """The modules, tensors and optimizers of one run of the Trainer, to undo what the precision has done to them.

    Half-precision weights of an evaluation, and the checkpoint from which the Tuner restores weights after a search,
    hold rounded values. So both keep the tensors from before the set-up, on the CPU.
    """

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self._modules: list[weakref.ref[Module]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._tunes = False

    def begin(self, plugin: Any, module: Module, trainer: Trainer | None) -> None:
        """Note that ``plugin`` will set ``module`` up, if a Trainer runs ``module``."""
        if trainer is None:
            return
        self._modules.append(weakref.ref(module))
        self._tunes = is_tuning(trainer)
        if _sharded_by(plugin) is not None:
            return
        if self._tunes or trainer.state.fn != TrainerFn.FITTING:
            self._before += [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]

    def keep_changed(self) -> None:
        """Forget the tensors whose dtype and class the set-up has left alone."""
        self._before = [
            (t, data.cpu()) for t, data in self._before if (t.dtype, type(t.data)) != (data.dtype, type(data))
        ]

    def end(self, plugin: Any) -> None:
        """Hand the modules back, and by ``plain_after_fit`` or after a search make them and their optimizers plain.

        The layers note how they rounded weights, for :func:`lightning_lowprec.export`. A model that the strategy leaves
        sharded stays as it is.
        """
        weights = Float32Weights()
        modules, self._modules = alive(self._modules), []
        before, self._before = self._before, []
        if (where := _sharded_by(plugin)) is not None:
            if plugin._in_trainer and plugin._will_train:
                rank_zero_info(
                    f"{plugin.precision}: the model keeps its low-precision layers and weights after `fit`, because"
                    f" {where} has sharded it. To call it outside of the Trainer, load a checkpoint into a fresh model."
                )
            return
        for module in modules:
            forget_updates(module.parameters())  # else a loop after the run would still update by its optimizer
        if not plugin.plain_after_fit and not self._tunes:
            return
        for module in modules:
            values = existing_masters(module.parameters()) | self._unwritten(before)
            ties_away = plugin.masters is not None and plugin.masters.config.form == "remainder"
            roundings = _roundings(module, ties_away=ties_away)
            take_back(module)
            layers = dict(module.named_modules())
            backends.left_roundings.update(
                (layers[fqn], rounding) for fqn, rounding in roundings.items() if fqn in layers
            )
            weights.undo_cast(module, values)
        for tensor, data in before if self._tunes else ():
            tensor.grad = None
            tensor.data = data.to(tensor.device)
        for optimizer in alive(self.optimizers):
            backends.revert_optimizer(optimizer)
            weights.follow(optimizer)

    def _unwritten(self, before: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Return the values from before an evaluation by ``id(tensor)``; where somebody has written, the new values."""
        cast = [(t, data) for t, data in before if t.dtype in HALF_DTYPES and data.dtype is torch.float32]
        return {} if self._tunes else {id(t): reconcile(data.to(t.device), t.data) for t, data in cast}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __getstate__(self) -> dict[str, object]:
        """Leave out tensors and optimizers, which stay in their process."""
        return {"optimizers": [], "_modules": [], "_before": [], "_tunes": False}


def _sharded_by(plugin: Any) -> str | None:
    """Return the strategy that leaves the model of ``plugin`` sharded; None: the model stays whole."""
    if plugin.engine is not None:
        return str(plugin.engine.name)
    return None if plugin.modules.sharded is None else "FSDP2"


def _roundings(module: Module, *, ties_away: bool) -> dict[str, dict[str, WeightRounding | None]]:
    """Return how the forward of each converted layer rounds its weights to FP8, by the layer's fqn."""
    return {
        fqn: {name: _of_master(getattr(layer, name), rounding, ties_away) for name, rounding in by_name.items()}
        for fqn, layer in module.named_modules()
        if (by_name := backends.weight_roundings(layer)) is not None
    }


def _of_master(weight: Tensor, rounding: WeightRounding | None, ties_away: bool) -> WeightRounding | None:
    """Return a rounding of the float32 value that a half-precision weight will have."""
    if rounding is None or weight.dtype not in HALF_DTYPES or not is_marked(weight):
        return rounding
    to_half = upper_half if ties_away else partial(Tensor.to, dtype=weight.dtype)
    return replace(rounding, as_trained=to_half)
