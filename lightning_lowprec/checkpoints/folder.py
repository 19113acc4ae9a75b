"""Read a folder of shards (torch.distributed.checkpoint): open and check the folder, then read tensors or rows of them.

A folder of this package has a manifest, and all its files are compared with the manifest before anything is read. A
folder of Lightning's ModelParallelStrategy or FSDPStrategy has none. In both, torch's table of contents
(:mod:`~lightning_lowprec.checkpoints.table`) says what is stored, in which pieces, and where each piece lies:

    manifest -> checksums -> meta.pt -> table      :class:`ShardFolder`, on all ranks
    table -> pieces -> given tensors, sharded      :meth:`ShardFolder.fill`, on all ranks, by torch
    table -> pieces -> rows of one tensor          :meth:`ShardFolder.rows`, on one rank
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lightning_lowprec.checkpoints import manifest, table, torch_file
from lightning_lowprec.checkpoints.agreement import on_all_ranks
from lightning_lowprec.checkpoints.optimizer_state import clean

EntryPath = tuple[str | int, ...]


@final
class ShardFolder:
    """An open folder. Entries have the names that torch gives them, such as ``model.fc.weight``.

    Args:
        path: the folder.
        weights_only: as in :func:`lightning_lowprec.checkpoints.torch_file.read`.
        verify: compare checksums, if the folder has some, before anything is read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or belongs to another save.
        pickle.UnpicklingError: a file holds objects that ``weights_only`` refuses.
    """

    def __init__(self, path: Path, weights_only: bool | None = None, *, verify: bool = True) -> None:
        stored = on_all_ranks(lambda: manifest.read(path, verify=verify))
        if stored is not None:
            stored.check(path, verify=verify)

        def read() -> tuple[Metadata, dict[str, Any]]:
            rest = torch_file.read(path / manifest.META, weights_only)
            save = rest.pop(manifest.SAVE, None)
            contents = table.read(path, weights_only)
            if stored is not None:
                manifest.check_save(path / manifest.META, save, stored.save)
                if table.TABLE in stored.files:  # not in format 1
                    manifest.check_save(
                        path / table.TABLE, getattr(contents.storage_meta, "save_id", None), stored.save
                    )
            return contents, rest

        self._path, self._weights_only, self._files = path, weights_only, _Files(weights_only)
        self._table, self.rest = on_all_ranks(read)
        """What is not sharded: counters, and the state of plugins and callbacks."""
        self.paths: Mapping[str, EntryPath] = self._table.planner_data
        """By entry: the keys that lead to it in the saved state."""
        entries = self._table.state_dict_metadata.items()
        self.tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        """The entries that are tensors, with ``size``, ``properties.dtype`` and ``chunks``."""
        self._pieces: dict[tuple[str, torch.Size], Tensor] = {}

    def names(self, key: str) -> dict[str, str]:
        """Return the fqns of the entries under a key, without the names of wrapping modules."""
        return {entry: clean(".".join(map(str, path[1:]))) for entry, path in self.paths.items() if str(path[0]) == key}

    def fill(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read into the tensors by entry; replace other values. All ranks call this together."""
        if not wanted:
            return wanted
        planner = _Planner(torch_file.runs_code(self._weights_only))
        try:
            load(wanted, storage_reader=_Reader(self._path, self._table, self._files), planner=planner)
        except CheckpointException as error:  # derives from BaseException, and its text is a traceback
            rank, (failure, _) = next(iter(error.failures.items()))
            if isinstance(failure, (FileNotFoundError, UnpicklingError, ValueError)):
                raise type(failure)(f"rank {rank}: {failure}") from None
            raise RuntimeError(f"rank {rank}: {type(failure).__name__}: {failure}") from error
        return wanted

    def rows(self, entry: str, start: int, stop: int) -> Tensor:
        """Return ``tensor[start:stop]``; a tensor without dimensions is one row. The pieces of the rows stay in memory."""
        stored = self.tensors[entry]
        if not stored.size:
            return self._piece(entry, stored.chunks[0].offsets).reshape(1)
        wanted = [c for c in stored.chunks if c.offsets[0] < stop and c.offsets[0] + c.sizes[0] > start]
        pieces = {(entry, chunk.offsets): chunk for chunk in wanted}
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in pieces}
        rows = torch.empty((stop - start, *stored.size[1:]), dtype=stored.properties.dtype)
        for key, chunk in pieces.items():
            if key not in self._pieces:
                self._pieces[key] = self._piece(*key)
            at, size = chunk.offsets[0], chunk.sizes[0]
            first, last = max(start, at), min(stop, at + size)
            beside = [slice(at, at + size) for at, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
            rows[(slice(first - start, last - start), *beside)] = self._pieces[key][first - at : last - at]
        return rows

    def _piece(self, entry: str, offsets: torch.Size) -> Tensor:
        place = table.place(self._table, entry, offsets)
        with self._files.create_stream(self._path / place.relative_path, "rb") as stream:
            stream.seek(place.offset)
            piece: Tensor = torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
        return piece


@final
class _Files(FileSystem):
    """Files for reading: what goes wrong while a file is read becomes an error that names the file."""

    def __init__(self, weights_only: bool | None) -> None:
        self._weights_only = weights_only

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing. Copy the whole folder, or load another checkpoint.")
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise torch_file.refusal(Path(path), error, self._weights_only) or ValueError(
                    f"{str(path)!r} is damaged, or belongs to another save ({type(error).__name__}: {reason})."
                    " Load another checkpoint."
                ) from error


@final
class _Reader(FileSystemReader):
    """A reader that has the table of contents already, and whose errors name the file."""

    def __init__(self, path: Path, contents: Metadata, files: _Files) -> None:
        super().__init__(path)
        self.fs, self._contents = files, contents

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._contents


@final
class _Planner(DefaultLoadPlanner):
    """A planner that reads flat keys, and pickles as ``weights_only`` says."""

    def __init__(self, runs_code: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._runs_code = runs_code

    @override
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=not self._runs_code)
