"""The names of Lightning's ModelParallelStrategy that ours sets, checked before they are used."""

from __future__ import annotations

from typing import Any, Final

import lightning
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.distributed import meshes
from lightning_lowprec.distributed.options import ShardOptions

NAMES: Final = ("_data_parallel_size", "_tensor_parallel_size", "_device_mesh")


def check_parent(strategy: Any) -> None:
    """Raise ImportError if this Lightning's strategy lacks one of :data:`NAMES`."""
    missing = [name for name in NAMES if not hasattr(strategy, name)]
    if missing:
        raise ImportError(
            f"lightning {lightning.__version__} has moved {', '.join(missing)} of ModelParallelStrategy, so 'fsdp2'"
            " does not run on it; lightning_lowprec is tested with lightning 2.5.0 to 2.6."
        )


def copies(strategy: Any, options: ShardOptions) -> int:
    """How many copies of the model there are, now that the number of nodes is known."""
    return int(strategy.num_nodes) if options.replicate == "nodes" else options.replicate


def set_sizes(strategy: Any, options: ShardOptions) -> None:
    """Before the process group exists: sizes that divide the world, for the mesh that the parent makes."""
    world_size = strategy.num_nodes * strategy.num_processes
    meshes.shards(world_size, copies(strategy, options), options.tensor_parallel_size, options.shards)
    strategy._tensor_parallel_size = options.tensor_parallel_size
    strategy._data_parallel_size = world_size // options.tensor_parallel_size


def set_mesh(strategy: Any, options: ShardOptions) -> DeviceMesh:
    """With copies of the model, a mesh of three dimensions in place of the parent's."""
    replicate = copies(strategy, options)
    if replicate > 1:
        strategy._device_mesh = meshes.make_mesh(
            strategy.root_device, strategy.world_size, replicate, options.tensor_parallel_size
        )
    mesh: DeviceMesh = strategy.device_mesh
    return mesh
