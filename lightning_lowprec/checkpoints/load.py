"""Load a sharded model and its optimizers, from and into any precision, by any number of ranks.

A checkpoint is a file of whole tensors or a folder of shards, of this package or of Lightning's ModelParallelStrategy
and FSDPStrategy. State is read into tensors that are sharded like the parameter of that name.

If the weights are half precision, a float32 ``master_param`` is stored beside the moments. Loaded into float32 weights,
the masters become the weights. Loaded into an optimizer that keeps masters, float32 weights become the masters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.checkpoints import files, optimizer_state
from lightning_lowprec.checkpoints.agreement import on_all_ranks, on_rank_zero, rank_and_ranks
from lightning_lowprec.checkpoints.folder import EntryPath, ShardFolder
from lightning_lowprec.checkpoints.optimizer_state import by_fqn, clean, named_parameters, place
from lightning_lowprec.checkpoints.save import find
from lightning_lowprec.conversion import backends
from lightning_lowprec.masters.moments import MASTER_PARAM, MASTER_REMAINDER, decoded_entry, joined
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.messages import info
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import reconcile
from lightning_lowprec.private.torch import local_tensor, with_local_tensor

State = dict[str, Any]


class StoredCheckpoint(ABC):
    """A checkpoint: models, optimizers, and the ``rest`` by key. A file's ``rest`` has all that is not loaded yet."""

    def __init__(self, rest: State) -> None:
        self.rest = rest

    @property
    def keys(self) -> list[str]:
        """Return the keys of everything in the checkpoint."""
        return sorted(map(str, self.rest))

    def check_keys(self, wanted: Iterable[str]) -> None:
        """Raise KeyError if the checkpoint lacks a key."""
        missing = sorted(set(wanted) - set(self.keys))
        if missing:
            raise KeyError(
                f"The checkpoint holds nothing under {', '.join(map(repr, missing))}; it holds: {', '.join(self.keys)}."
                " Ask for less, or pass `strict=False`."
            )

    @abstractmethod
    def model(self, key: str, live: Mapping[str, object]) -> State:
        """Return the entries of a model, sharded like the entries of its state dict ``live``, which may be filled."""

    @abstractmethod
    def optimizer(self, key: str, model: nn.Module, optimizer: Optimizer) -> State:
        """Return an optimizer's state dict by fqn, sharded like the parameters of ``model``."""


@final
class StoredFile(StoredCheckpoint):
    """A single file. Every rank reads its whole tensors, from disk when they are used."""

    @override
    def model(self, key: str, live: Mapping[str, Any]) -> State:
        values = {clean(fqn): value for fqn, value in self.rest.pop(key).items()}
        for fqn, value in values.items():
            if isinstance(value, Tensor) and isinstance(live.get(fqn), Tensor):
                _check_shape(fqn, value.shape, live[fqn])
                values[fqn] = place(value, live[fqn])
        return values

    @override
    def optimizer(self, key: str, model: nn.Module, optimizer: Optimizer) -> State:
        stored = by_fqn(self.rest.pop(key), model, optimizer, key)
        return {**stored, "state": optimizer_state.placed(stored["state"], named_parameters(model))}


@final
class StoredFolder(StoredCheckpoint):
    """A folder to which every rank has written its shards. Stored entries that the model lacks are not read."""

    def __init__(self, folder: ShardFolder) -> None:
        super().__init__(folder.rest)
        self._folder = folder

    @property
    @override
    def keys(self) -> list[str]:
        return sorted({*map(str, self.rest), *(str(path[0]) for path in self._folder.paths.values())})

    @override
    def model(self, key: str, live: Mapping[str, Any]) -> State:
        names = self._folder.names(key)
        wanted: State = {entry: 0 for entry, name in names.items() if name in live}
        for entry in wanted.keys() & self._folder.tensors.keys():
            stored, like = self._folder.tensors[entry], live[names[entry]]
            _check_shape(entry, stored.size, like)
            same = like.dtype == stored.properties.dtype
            wanted[entry] = like if same else torch.empty_like(like, dtype=stored.properties.dtype)
        values = self._folder.fill(wanted)
        return {name: values.get(entry) for entry, name in names.items()}

    @override
    def optimizer(self, key: str, model: nn.Module, optimizer: Optimizer) -> State:
        params = named_parameters(model)
        paths = self._folder.paths
        wanted: State = {}
        for entry, (root, *path) in paths.items():
            like = params.get(clean(str(path[1]))) if root == key and path[0] == "state" else None
            if root == key and (path[0] != "state" or like is not None):
                wanted[entry] = 0
                if (stored := self._folder.tensors.get(entry)) is not None:
                    name = entry.rpartition(".")[2]
                    placements = None if like is None else optimizer_state.placements_of(name, stored.size, like)
                    wanted[entry] = optimizer_state.empty(stored.size, stored.properties.dtype, like, placements)
        nested = _nested({paths[entry][1:]: value for entry, value in self._folder.fill(wanted).items()})
        return by_fqn({"state": {}, **nested}, model, optimizer, key)


def open_checkpoint(path: Path, weights_only: bool | None = None, *, verify: bool = True) -> StoredCheckpoint:
    """Open the checkpoint that is called ``path`` on rank 0, on all ranks.

    If a run was killed while it replaced the checkpoint, that is the complete new one. ``verify`` compares checksums
    before anything is loaded. ``weights_only`` and the errors are those of
    :func:`lightning_lowprec.checkpoints.files.read`.
    """
    complete = on_rank_zero(lambda: find(path))
    if complete != path:
        info(f"fsdp2: {str(path)!r} is being replaced, or a run was killed there; loading the new {str(complete)!r}.")
    if not verify:
        info(f"fsdp2: the checksums of {str(complete)!r} are not compared (`verify_checkpoints=False`).")
    if complete.is_dir():
        return StoredFolder(ShardFolder(complete, weights_only, verify=verify))
    # each rank compares the checksums of its part of the file
    if verify and not on_all_ranks(lambda: files.check_records(complete, *rank_and_ranks())):
        info(f"fsdp2: {str(complete)!r} was written without checksums; damage to it is not noticed.")
    return StoredFile(on_all_ranks(lambda: files.read(complete, weights_only)))


def load(
    stored: StoredCheckpoint, model: nn.Module, key: str, optimizers: Mapping[str, Optimizer], *, strict: bool
) -> None:
    """Load a sharded model, and optimizers by key, from a checkpoint that was written by any number of ranks."""
    live = get_model_state_dict(model)
    values = stored.model(key, live)
    states = {name: stored.optimizer(name, model, optimizer) for name, optimizer in optimizers.items()}
    missing, unexpected = sorted(live.keys() - values.keys()), sorted(values.keys() - live.keys())
    if strict and (missing or unexpected):
        raise KeyError(
            f"{type(model).__name__} and the checkpoint differ. Missing in the checkpoint: {missing[:5]}, unexpected:"
            f" {unexpected[:5]}. Pass `strict=False` (in a LightningModule, `strict_loading = False`) to load the rest."
        )
    values = {fqn: value for fqn, value in values.items() if fqn in live}
    params = named_parameters(model)
    for name, state_dict in states.items():
        _settle_masters(optimizers[name], state_dict, params, values)
    set_model_state_dict(model, values, options=StateDictOptions(strict=strict))
    for name, state_dict in states.items():
        optimizer_state.load(optimizers[name], state_dict)


def _settle_masters(optimizer: Optimizer, state_dict: State, params: Mapping[str, Tensor], values: State) -> None:
    """Turn masters into float32 weights where they have no place; float32 weights reach masters as they are loaded."""
    state = state_dict["state"]
    for fqn in [fqn for group in state_dict["param_groups"] for fqn in group["params"]]:
        has_master = registry_of(optimizer) is not None and params[fqn].dtype in HALF_DTYPES
        weight = values.get(fqn)
        if fqn in state and not has_master:  # 8 bits become float32 values, and a remainder the float32 master
            state[fqn] = decoded_entry(state[fqn], params[fqn])
            remainder = state[fqn].pop(MASTER_REMAINDER, None)
            if remainder is not None and weight is not None:
                state[fqn][MASTER_PARAM] = with_local_tensor(joined(weight, remainder), weight)
        master = state.get(fqn, {}).get(MASTER_PARAM)
        if master is not None and not has_master and not backends.keeps_master(params[fqn]):
            state[fqn] = {name: value for name, value in state[fqn].items() if name != MASTER_PARAM}
            if weight is not None and weight.dtype in HALF_DTYPES and params[fqn].dtype == torch.float32:
                values[fqn] = with_local_tensor(reconcile(local_tensor(master), local_tensor(weight)), weight)
        if fqn in state and not state[fqn]:
            del state[fqn]


def _check_shape(name: str, stored: torch.Size, like: Tensor) -> None:
    if stored != like.shape:
        raise ValueError(
            f"{name!r} has the shape {tuple(stored)} in the checkpoint and {tuple(like.shape)} in the model."
        )


def _nested(items: Mapping[EntryPath, Any]) -> Any:
    """Nest values by path, as dicts, or as lists where the path has numbers."""
    if () in items:
        return items[()]
    inner: dict[str | int, dict[EntryPath, object]] = {}
    for (first, *rest), value in items.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    values = {key: _nested(sub) for key, sub in inner.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values
