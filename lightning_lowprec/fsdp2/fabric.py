"""FSDP2 for Fabric."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.checkpoints import optimizer_state
from lightning_lowprec.checkpoints.load import StoredFile, StoredFolder, load, open_checkpoint
from lightning_lowprec.checkpoints.save import model_state, save
from lightning_lowprec.fsdp2.shard import is_sharded
from lightning_lowprec.fsdp2.strategy import FSDP2Base, check_storage_options
from lightning_lowprec.numerics.parameters import clip_grad_norm
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.private.either import fabric_strategies

if TYPE_CHECKING:
    _Parent = fabric_strategies.ModelParallelStrategy
else:
    _Parent = object


class ForFabric(FSDP2Base, _Parent):
    """What the strategy does in any package of Lightning; its last base is ModelParallelStrategy of that package."""

    in_fabric = True

    @override
    def setup_module(self, module: Module) -> Module:
        self.sharding.apply(module, self.device_mesh, self.precision, self.root_device)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.sharding.follow(optimizer)
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
        output = super().optimizer_step(optimizer, **kwargs)
        self.sharding.after_step()
        return output

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: object = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save ``state`` completely, or not at all: one sharded model, its optimizers, and anything else."""
        check_storage_options(storage_options)
        if filter is not None and not self.is_full:
            raise NotImplementedError(
                "`filter=` leaves entries out, and a sharded checkpoint without them could not be loaded. Use"
                " `state_dict_type='full'`."
            )
        _, model = _one_model(state, "save")
        shards: dict[str, object] = {}
        rest: dict[str, object] = {}
        for key, value in state.items():
            if isinstance(value, Module):  # rank 0 writes what is whole on every rank
                (shards if is_sharded(value) else rest)[key] = model_state(value, full=self.is_full)
            elif isinstance(value, Optimizer):
                shards[key] = optimizer_state.collect(model, value, full=self.is_full)
            else:
                stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
                rest[key] = value.state_dict() if stateful else value
        for key, keep in (filter or {}).items():
            for part in (shards, rest):
                if isinstance(values := part.get(key), Mapping):
                    part[key] = {name: value for name, value in values.items() if keep(name, value)}
        save(Path(self.broadcast(path)), shards, rest, full=self.is_full)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, object]:
        """Load a folder or file of any precision and number of ranks into ``state``; return what ``state`` lacks."""
        stored = open_checkpoint(Path(self.broadcast(path)), weights_only, verify=self.verify_checkpoints)
        if isinstance(state, Module):
            if isinstance(stored, StoredFolder):
                raise ValueError(f"{str(path)!r} is a folder; `fabric.load_raw` loads the file of a full state dict.")
            load(StoredFile({"model": stored.rest}), state, "model", {}, strict=strict)
            return {}
        if not isinstance(state, dict):
            raise ValueError(f"`state={type(state).__name__}` is not valid; expected a model, or a dict with one.")
        key, model = _one_model(state, "load")
        stored.check_keys(state if strict else [key])
        optimizers = {k: value for k, value in state.items() if isinstance(value, Optimizer) and k in stored.keys}
        load(stored, model, key, optimizers, strict=strict)
        for name, value in state.items():
            if name not in stored.rest:
                if isinstance(value, Module) and value is not model and name in stored.keys:
                    load(stored, value, name, {}, strict=strict)  # Lightning has it among the shards
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(stored.rest.pop(name))
            else:
                state[name] = stored.rest.pop(name)
        return stored.rest


@final
class FabricFSDP2Strategy(ForFabric, fabric_strategies.ModelParallelStrategy):
    """Fully sharded training by FSDP2 in every precision: ``fabric.setup(model, optimizer)`` works, in any order."""


def _one_model(state: Mapping[str, object], verb: str) -> tuple[str, Module]:
    models = {key: value for key, value in state.items() if isinstance(value, Module) and is_sharded(value)}
    if len(models) == 1:
        return next(iter(models.items()))
    count = f"{len(models)} sharded models ({', '.join(models)})" if models else "no sharded model"
    raise ValueError(
        f"fabric.{verb}: found {count} in the state, expected one. Set the model up first (`fabric.setup`) and pass it,"
        " with its optimizers, as `{'model': model, ...}`; several models go into several checkpoints."
    )
