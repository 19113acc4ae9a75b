"""FSDP2 for Fabric."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric import strategies as fabric
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import strategies as trainer
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.fsdp2 import checkpoint, checkpoint_layouts, torchao_optimizers
from lightning_lowprec.fsdp2.from_fsdp import translate
from lightning_lowprec.fsdp2.lightning_parts import check_parent, set_mesh, set_sizes
from lightning_lowprec.fsdp2.meshes import data_ranks
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.several_meshes import clip_grad_norm
from lightning_lowprec.fsdp2.strategy import Sharding
from lightning_lowprec.fsdp2.trainer import check_state_dict_type
from lightning_lowprec.precision.base import LowPrecision


class FabricFSDP2Strategy(ModelParallelStrategy):
    """Fully sharded training by FSDP2 in every precision: ``fabric.setup(model, optimizer)`` works, in any order.

    Args:
        state_dict_type: ``"sharded"`` checkpoints are folders to which every rank writes its shards, ``"full"`` ones
            are single files.
        process_group_backend: None: nccl on CUDA, gloo on CPU.
        timeout: of the process group.
        cluster_environment: where the processes come from; None: Lightning finds out.
        checkpoint_io: must be None: Fabric's sharded strategies write their checkpoints themselves.
        options: see :class:`~lightning_lowprec.fsdp2.options.ShardOptions`.

    Raises:
        ValueError: an option that is not valid.
    """

    strategy_name = "fsdp2"

    def __init__(
        self,
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **options: Any,
    ) -> None:
        check_state_dict_type(state_dict_type)
        if checkpoint_io is not None:
            raise ValueError(
                f"`checkpoint_io={checkpoint_io!r}` is not possible in Fabric: its sharded strategies write their"
                " checkpoints themselves. Leave it out, or use the Trainer."
            )
        super().__init__(
            parallelize_fn=lambda module, mesh: module,  # not called: `setup_module` is ours
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        check_parent(self)
        self.cluster_environment = cluster_environment
        self.state_dict_type = state_dict_type
        self.arguments = {
            "state_dict_type": state_dict_type,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            **options,
        }
        self.sharding = Sharding(ShardOptions(**options))

    @classmethod
    def from_fsdp(cls, strategy: fabric.FSDPStrategy | trainer.FSDPStrategy) -> FabricFSDP2Strategy:
        """What Lightning's ``FSDPStrategy``, of the Trainer or of Fabric, becomes in FSDP2; a log line says it.

        Raises:
            TypeError: not an ``FSDPStrategy``, or of a derived class.
            ValueError: it has a choice without an equal in FSDP2; the message names what to use.
        """
        return cls(**translate(strategy))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data this rank reads."""
        return data_ranks(self.device_mesh)

    @override
    def setup_environment(self) -> None:
        """Processes, their mesh, and what the precision has to know of them."""
        self.sharding.meet(self.precision, self.root_device)
        set_sizes(self, self.sharding.options)
        super().setup_environment()
        set_mesh(self, self.sharding.options)

    @override
    def setup_module(self, module: Module) -> Module:
        """Shard a module that Fabric has had converted."""
        self.sharding.apply(module, self.device_mesh, self.precision, self.root_device)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer, built before or after sharding, updates the shards."""
        self.sharding.follow(optimizer)
        torchao_optimizers.check(optimizer)
        if isinstance(self.precision, LowPrecision):
            self.precision.see_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of all gradients; with tensor parallelism they lie on two meshes."""
        if self.sharding.options.tensor_parallel is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """A step; after the first, what was gathered is checked and said."""
        output = super().optimizer_step(optimizer, **kwargs)
        self.sharding.after_step()
        return output

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save ``state``: complete, or not at all. See :mod:`~lightning_lowprec.fsdp2.checkpoint`.

        Raises:
            TypeError: ``storage_options``, which only a CheckpointIO takes.
            ValueError: no sharded model in ``state``, or several.
            NotImplementedError: a ``filter`` with sharded checkpoints.
        """
        checkpoint_layouts.check_storage_options(storage_options)
        full = self.state_dict_type == "full"
        if filter is not None and not full:
            raise NotImplementedError(
                "`filter=` leaves entries out, and a sharded checkpoint without them could not be loaded. Use"
                " `state_dict_type='full'`."
            )
        checkpoint_layouts.save_state(Path(self.broadcast(path)), state, full=full, filter=filter)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any precision and number of ranks into ``state``; returns what ``state`` has no key for.

        Folders and single files are told apart by themselves. ``weights_only`` None means True.

        Raises:
            ValueError: no sharded model in ``state``, or several; or the checkpoint is of another model.
            KeyError: something that the checkpoint does not hold, unless not ``strict``.
            FileNotFoundError: there is no checkpoint.
        """
        asked = Path(self.broadcast(path))
        found = checkpoint.locate(asked)
        checkpoint_layouts.say_where(asked, found)
        if isinstance(state, Module):
            checkpoint_layouts.load_raw(found, state, strict=strict)
            return {}
        if not isinstance(state, dict):
            raise ValueError(f"`state={type(state).__name__}` is not valid; expected a model, or a dict with one.")
        return checkpoint_layouts.load_state(found, state, strict=strict, weights_only=weights_only is not False)
