"""FSDP2 for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.fsdp2 import checkpoint_layouts, torchao_optimizers
from lightning_lowprec.fsdp2.meshes import clip_grad_norm
from lightning_lowprec.fsdp2.strategy import FSDP2Base
from lightning_lowprec.precision.base import LowPrecision


class FabricFSDP2Strategy(FSDP2Base, ModelParallelStrategy):
    """Fully sharded training by FSDP2 in every precision: ``fabric.setup(model, optimizer)`` works, in any order."""

    parent_arguments: ClassVar[Mapping[str, Any]] = {"parallelize_fn": None}  # `setup_module` here does not call it
    takes_checkpoint_io = False

    @override
    def setup_module(self, module: Module) -> Module:
        """Shard a module that the precision plugin has converted."""
        self.sharding.apply(module, self.device_mesh, self.precision, self.root_device)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer, built before or after sharding, update the shards."""
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
        """Clip by the norm of all gradients, which lie on two meshes with tensor parallelism."""
        if self.sharding.options.tensor_parallel is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; after the first step, check and log what was gathered."""
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
        """Save ``state`` completely, or not at all. See :mod:`~lightning_lowprec.fsdp2.atomic`.

        Raises:
            TypeError: ``storage_options`` is given, which only a CheckpointIO takes.
            ValueError: ``state`` has no sharded model, or several.
            NotImplementedError: ``filter`` is given, and checkpoints are folders.
        """
        checkpoint_layouts.check_storage_options(storage_options)
        if filter is not None and not self.is_full:
            raise NotImplementedError(
                "`filter=` leaves entries out, and a sharded checkpoint without them could not be loaded. Use"
                " `state_dict_type='full'`."
            )
        checkpoint_layouts.save_state(Path(self.broadcast(path)), state, full=self.is_full, filter=filter)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any precision and number of ranks into ``state``; return what ``state`` has no key for.

        The checkpoint may be a folder or a single file. ``weights_only=None`` means True.

        Raises:
            ValueError: ``state`` has no sharded model, or several; or the checkpoint belongs to another model.
            KeyError: the checkpoint lacks an entry of ``state``, with ``strict=True``.
            FileNotFoundError: there is no checkpoint.
        """
        path = Path(self.broadcast(path))
        if isinstance(state, Module):
            checkpoint_layouts.load_raw(path, state, strict=strict)
            return {}
        if not isinstance(state, dict):
            raise ValueError(f"`state={type(state).__name__}` is not valid; expected a model, or a dict with one.")
        return checkpoint_layouts.load_state(path, state, strict=strict, weights_only=weights_only is not False)
