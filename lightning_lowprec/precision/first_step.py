"""What is prepared and checked once, between the set-up of a model and its first optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_lowprec.precision import refusals


def in_trainer(plugin: Any, model: Any, optimizers: Sequence[Optimizer], *, will_train: bool) -> None:
    """Prepare all optimizers of the Trainer, and check them.

    Args:
        plugin: the precision.
        model: what the Trainer trains, perhaps wrapped by DDP.
        optimizers: all optimizers of the Trainer.
        will_train: if not, the optimizers are those of an earlier fit, perhaps of another model.
    """
    if will_train:
        if plugin.masters is not None:
            refusals.check_trainer(model, optimizers, plugin.masters.config, plugin.precision)
        for optimizer in optimizers:
            plugin._prepare_optimizer(optimizer)
        if plugin.masters is not None:
            plugin.masters.drop_originals()
        plugin._check_optimizers(optimizers)
    plugin.modules.note_check()


def in_fabric(plugin: Any, optimizer: Optimizer) -> None:
    """Prepare and check before the first step of ``optimizer`` after a set-up of modules by Fabric."""
    if plugin.optimizers.any_added:
        plugin._check_optimizers([*plugin.optimizers.known, optimizer])
    plugin._prepare_weights_of(optimizer)  # with `plugins=`, the optimizer was not known before
    if plugin.masters is not None:
        refusals.refuse_uncast(plugin.modules.sharded, plugin.precision)
        plugin.masters.gradients.check_reduced()
        plugin.masters.drop_originals()
    plugin.modules.note_check()
