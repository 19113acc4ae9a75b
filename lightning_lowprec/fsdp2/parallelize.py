"""Convert and shard a model for users who keep Lightning's ModelParallelStrategy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from lightning_lowprec.fsdp2.options import ShardChoices, ShardOptions
from lightning_lowprec.fsdp2.strategy import Sharding
from lightning_lowprec.precision.base import LowPrecision


def parallelize(model: Module, mesh: DeviceMesh, plugin: LowPrecision, **options: Unpack[ShardChoices]) -> Module:
    """Convert and shard ``model`` in place, in ``configure_model`` or in a ``parallelize_fn``.

        def configure_model(self):
            lightning_lowprec.parallelize(self, self.device_mesh, self.trainer.precision_plugin)

        ModelParallelStrategy(parallelize_fn=lambda model, mesh: parallelize(model, mesh, fabric.strategy.precision))

    Args:
        model: not sharded yet; a second call changes nothing.
        mesh: Lightning's ``device_mesh``, or a mesh of at most two dimensions (copies, shards).
        plugin: the precision.
        options: the fields of :class:`~lightning_lowprec.fsdp2.options.ShardOptions`. The mesh says how many copies,
            shards and tensor-parallel ranks there are, so ``replicate`` and ``shards`` raise.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: the model was sharded already, but not by this function.
        ValueError: options that do not fit the precision or the model.
    """
    for name in ("replicate", "shards"):
        if name in options:
            raise ValueError(
                f"`{name}={options[name]!r}` is not valid in `parallelize`: the mesh says it. Pass such a mesh."
            )
    sharding = Sharding(ShardOptions(**options))
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    sharding.meet(plugin, device)
    if not sharding.knows(model, plugin):
        plugin.convert_module(model)
    sharding.apply(model, mesh, plugin, device)
    return model
