"""Read checkpoints: single files of whole tensors, and folders of shards (torch.distributed.checkpoint).

Both kinds come from this package, and from Lightning's ModelParallelStrategy and FSDPStrategy.

To read a folder, torch fills tensors that it is given, so a reader must know beforehand what is stored. The folder's
table of contents says this: the state that an optimizer has, its dtypes, and how it is nested. State is read into
tensors that are sharded like the parameter of that name. The table, ``.metadata``, is a pickle of torch: read only
folders that you trust. Everything else is read with ``weights_only=True``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.fsdp2 import atomic, torchao_optimizers
from lightning_lowprec.fsdp2.optimizer_state import by_fqn, clean, named_parameters, placed, unpacked
from lightning_lowprec.fsdp2.placement import empty, place

State = dict[str, Any]
EntryPath = tuple[str | int, ...]


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
    def model(self, key: str, live: Mapping[str, Any]) -> State:
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
        found = by_fqn(self.rest.pop(key), model, optimizer, key)
        return {**found, "state": placed(found["state"], named_parameters(model))}


@final
class StoredFolder(StoredCheckpoint):
    """A folder to which every rank has written its shards. Stored entries that the model lacks are not read."""

    def __init__(self, path: Path, rest: State) -> None:
        super().__init__(rest)
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        paths = metadata.planner_data
        if not isinstance(paths, dict):
            raise ValueError(f"{str(path)!r} was not written by a plan that says how its entries are nested.")
        stored = metadata.state_dict_metadata
        self._path_of: dict[str, EntryPath] = {entry: tuple(paths.get(entry, (entry,))) for entry in stored}
        tensors = {entry: of for entry, of in stored.items() if isinstance(of, TensorStorageMetadata)}
        self._tensors = {entry: (of.size, of.properties.dtype) for entry, of in tensors.items()}

    @property
    @override
    def keys(self) -> list[str]:
        return sorted({*map(str, self.rest), *(str(path[0]) for path in self._path_of.values())})

    @override
    def model(self, key: str, live: Mapping[str, Any]) -> State:
        names = {entry: clean(".".join(map(str, path[1:]))) for entry, path in self._path_of.items() if path[0] == key}
        wanted: State = {entry: 0 for entry, name in names.items() if name in live}
        for entry in [entry for entry in wanted if entry in self._tensors]:
            size, dtype = self._tensors[entry]
            like = live[names[entry]]
            _check_shape(entry, size, like)
            wanted[entry] = like if like.dtype == dtype else torch.empty_like(like, dtype=dtype)
        values = self._read(wanted)
        return {name: values.get(entry) for entry, name in names.items()}

    @override
    def optimizer(self, key: str, model: nn.Module, optimizer: Optimizer) -> State:
        params = named_parameters(model)
        wanted: State = {}
        for entry, (root, *path) in self._path_of.items():
            like = params.get(clean(str(path[1]))) if root == key and path[0] == "state" else None
            if root == key and (path[0] != "state" or like is not None):
                wanted[entry] = self._memory(entry, like) if entry in self._tensors else 0
        nested = _nested({self._path_of[entry][1:]: value for entry, value in self._read(wanted).items()})
        state = {
            fqn: {name: unpacked(value, params[clean(fqn)]) for name, value in values.items()}
            for fqn, values in nested.get("state", {}).items()
        }
        return by_fqn({"state": state, "param_groups": nested["param_groups"]}, model, optimizer, key)

    def _memory(self, entry: str, like: Tensor | None) -> Tensor:
        """Return a tensor to read into; ``like`` is the parameter, if the entry is its state."""
        size, dtype = self._tensors[entry]
        prefix, _, name = entry.rpartition(".")
        if like is None:
            return torch.empty(size, dtype=dtype)
        if f"{prefix}.{torchao_optimizers.CLASS}" not in self._path_of:
            return empty(size, dtype, like)
        block_size = like.numel() // self._tensors[f"{prefix}.scale"][0].numel()
        rows = name != "qmap" and torchao_optimizers.keeps_blocks(block_size, like)
        return empty(size, dtype, like, like.placements if rows and isinstance(like, DTensor) else ())

    def _read(self, wanted: State) -> State:
        if wanted:
            load(wanted, storage_reader=self._reader, planner=_Planner())
        return wanted


def open_checkpoint(path: Path, weights_only: bool) -> StoredCheckpoint:
    """Open the checkpoint that is called ``path`` on rank 0, on all ranks.

    If a run was killed while it replaced the checkpoint, the old checkpoint may be used; a log line says so.
    """
    found = atomic.on_rank_zero(lambda: atomic.find(path))
    if found != path:
        rank_zero_info(f"fsdp2: {str(path)!r} was not completed; loading the one before it, {str(found)!r}.")
    file = found / atomic.META if found.is_dir() else found
    rest = torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
    return StoredFolder(found, rest) if found.is_dir() else StoredFile(rest)


@final
class _Planner(DefaultLoadPlanner):
    """A planner that reads flat keys, and nothing that needs pickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _check_shape(name: str, stored: torch.Size, like: Tensor) -> None:
    if stored != like.shape:
        raise ValueError(
            f"{name!r} has the shape {tuple(stored)} in the checkpoint and {tuple(like.shape)} in the model."
        )


def _nested(items: Mapping[EntryPath, Any]) -> Any:
    """Nest values by path, as dicts, or as lists where the path has numbers."""
    if () in items:
        return items[()]
    inner: dict[str | int, dict[EntryPath, Any]] = {}
    for (first, *rest), value in items.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    values = {key: _nested(sub) for key, sub in inner.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values
