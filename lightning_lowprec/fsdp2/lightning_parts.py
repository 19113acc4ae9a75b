"""The names of Lightning's ModelParallelStrategy that ours sets, checked before they are used."""

from __future__ import annotations

from typing import Any, Final

import lightning
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.fsdp2 import meshes
from lightning_lowprec.fsdp2.options import ShardOptions

NAMES: Final = ("_data_parallel_size", "_tensor_parallel_size", "_device_mesh", "_process_group_backend")
OFFLOADING: Final = "cpu:gloo,cuda:nccl"
"""Backends for shards in CPU memory: norms and overflow flags are reduced there."""
SIGNAL_NAMES: Final = ("received_sigterm", "_sigterm_notifier_fn")
"""Of the Trainer's ``_signal_connector``."""


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
    """Before the process group exists: sizes that divide the world, for the mesh, and the backends that are needed."""
    world_size = strategy.num_nodes * strategy.num_processes
    meshes.shards(world_size, copies(strategy, options), options.tensor_parallel_size, options.shards)
    strategy._tensor_parallel_size = options.tensor_parallel_size
    strategy._data_parallel_size = world_size // options.tensor_parallel_size
    if options.cpu_offload and strategy.process_group_backend is None and strategy.root_device.type == "cuda":
        strategy._process_group_backend = OFFLOADING


def set_mesh(strategy: Any, options: ShardOptions) -> DeviceMesh:
    """With copies of the model, a mesh of three dimensions in place of the parent's."""
    replicate = copies(strategy, options)
    if replicate > 1:
        strategy._device_mesh = meshes.make_mesh(
            strategy.root_device, strategy.world_size, replicate, options.tensor_parallel_size
        )
    mesh: DeviceMesh = strategy.device_mesh
    return mesh


def note_sigterm(trainer: Any) -> None:
    """Let a SIGTERM be noted, and passed on to the ranks that this one started, and do no more inside the handler.

    Lightning 2.6 broadcasts inside of it, wherever the training step is just then: ranks that are in another collective
    wait for each other for ever. What was noted ends the run after the batch, as in 2.5. To be removed when Lightning's
    handler calls no collective any more. A Lightning that has moved these names keeps its own handler.
    """
    connector: Any = getattr(trainer, "_signal_connector", None)
    if not all(hasattr(connector, name) for name in SIGNAL_NAMES):
        return

    def notify(signum: int, frame: Any) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = notify
