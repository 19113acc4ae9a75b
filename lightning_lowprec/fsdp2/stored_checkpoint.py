"""Read checkpoints: single files of whole tensors, and folders of shards (torch.distributed.checkpoint).

Both kinds come from this package, and from Lightning's ModelParallelStrategy and FSDPStrategy.

To read a folder, torch fills tensors that it is given, so a reader must know beforehand what is stored. The folder's
table of contents says this: the state that an optimizer has, its dtypes, and how it is nested. State is read into
tensors that are sharded like the parameter of that name. Folders of this package have a manifest with the table, and
their files are checked against the manifest before anything is loaded. The table of other folders is a pickle, which is
read without running its code. Files of ``torch.save`` are read with ``weights_only=True`` unless the user says
otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.fsdp2 import atomic, foreign_table, manifest, torch_file, torchao_optimizers
from lightning_lowprec.fsdp2.agreement import on_all_ranks, on_rank_zero, rank_and_ranks
from lightning_lowprec.fsdp2.optimizer_state import by_fqn, clean, named_parameters, placed, rows_of_blocks, unpacked
from lightning_lowprec.fsdp2.placement import empty, place
from lightning_lowprec.fsdp2.shard_files import NamedFiles, other_save
from lightning_lowprec.fsdp2.table import EntryPath, StoredTensor, Table, metadata_of

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

    def __init__(self, path: Path, table: Table, rest: State, weights_only: bool | None) -> None:
        super().__init__(rest)
        self._reader = _Reader(path, table, weights_only)
        self._runs_code = torch_file.runs_code(weights_only)
        self._path_of: dict[str, EntryPath] = {name: entry.path for name, entry in table.items()}
        tensors = {name: entry.content for name, entry in table.items() if isinstance(entry.content, StoredTensor)}
        self._tensors = {name: (tensor.size, tensor.dtype) for name, tensor in tensors.items()}

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
            return empty(size, dtype, like, rows_of_blocks(name, like))
        block_size = like.numel() // self._tensors[f"{prefix}.scale"][0].numel()
        rows = name != "qmap" and torchao_optimizers.keeps_blocks(block_size, like)
        return empty(size, dtype, like, like.placements if rows and isinstance(like, DTensor) else ())

    def _read(self, wanted: State) -> State:
        if wanted:
            try:
                load(wanted, storage_reader=self._reader, planner=_Planner(self._runs_code))
            except CheckpointException as error:  # derives from BaseException, and its text is a traceback
                rank, (failure, _) = next(iter(error.failures.items()))
                if isinstance(failure, (FileNotFoundError, UnpicklingError, ValueError)):
                    raise type(failure)(f"rank {rank}: {failure}") from None
                raise RuntimeError(f"rank {rank}: {type(failure).__name__}: {failure}") from error
        return wanted


def open_checkpoint(path: Path, weights_only: bool | None = None, *, verify: bool = True) -> StoredCheckpoint:
    """Open the checkpoint that is called ``path`` on rank 0, on all ranks.

    If a run was killed while it replaced the checkpoint, the old checkpoint may be used; a log line says so.

    Args:
        path: a folder or a file.
        weights_only: as in :func:`lightning_lowprec.fsdp2.torch_file.read`.
        verify: compare checksums before anything is loaded. What has none is not compared.

    Raises:
        FileNotFoundError: there is no checkpoint, or a folder lacks a file.
        ValueError: a file is damaged, or belongs to another save.
        pickle.UnpicklingError: a file holds objects that ``weights_only`` refuses.
    """
    found = on_rank_zero(lambda: atomic.find(path))
    if found != path:
        rank_zero_info(f"fsdp2: {str(path)!r} was not completed; loading the one before it, {str(found)!r}.")
    if not verify:
        rank_zero_info(f"fsdp2: the checksums of {str(found)!r} are not compared (`verify_checkpoints=False`).")
    return (_open_folder if found.is_dir() else _open_file)(found, weights_only, verify)


def _open_file(path: Path, weights_only: bool | None, verify: bool) -> StoredFile:
    """Open a single file; each rank compares the checksums of its part of the records."""
    if verify and not on_all_ranks(lambda: torch_file.check_records(path, *rank_and_ranks())):
        rank_zero_info(f"fsdp2: {str(path)!r} was written without checksums; damage to it is not noticed.")
    return StoredFile(on_all_ranks(lambda: torch_file.read(path, weights_only)))


def _open_folder(path: Path, weights_only: bool | None, verify: bool) -> StoredFolder:
    """Open a folder: one of this package by its manifest, any other by torch's table of contents."""
    stored = on_all_ranks(lambda: manifest.read(path, verify=verify))
    if stored is not None:
        stored.check(path, verify=verify)
    file = path / manifest.META

    def read() -> tuple[State, Table]:
        rest = torch_file.read(file, weights_only)
        save = rest.pop(manifest.SAVE, None)
        if stored is None:
            return rest, foreign_table.read(path, weights_only)
        if save != stored.save:
            raise ValueError(other_save(file, save, stored.save))
        return rest, stored.table

    rest, table = on_all_ranks(read)
    return StoredFolder(path, table, rest, weights_only)


@final
class _Reader(FileSystemReader):
    """A reader that has the table of contents already, and whose errors name the file."""

    def __init__(self, path: Path, table: Table, weights_only: bool | None) -> None:
        super().__init__(path)
        self.fs = NamedFiles(weights_only)
        self._metadata = metadata_of(table)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@final
class _Planner(DefaultLoadPlanner):
    """A planner that reads flat keys, and pickles as ``weights_only`` says."""

    def __init__(self, runs_code: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._runs_code = runs_code

    @override
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=not self._runs_code)


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
