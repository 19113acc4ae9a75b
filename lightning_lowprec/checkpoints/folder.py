"""Read a folder of shards (torch.distributed.checkpoint): open and check the folder, then read tensors or rows of them.

A folder of this package has a manifest, and all its files are compared with the manifest before anything is read. A
folder of Lightning's ModelParallelStrategy or FSDPStrategy has none. In both, torch's table of contents
(:mod:`~lightning_lowprec.checkpoints.table`) says what is stored, in which pieces, and where each piece lies:

    manifest -> checksums -> meta.pt -> table      :class:`ShardFolder`, on all ranks
    table -> pieces -> given tensors, sharded      :meth:`ShardFolder.fill`, on all ranks
    table -> pieces -> rows of one tensor          :meth:`ShardFolder.rows`, on one rank
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_lowprec.checkpoints import manifest, table, torch_file
from lightning_lowprec.checkpoints.agreement import on_all_ranks
from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.private.torch import local_tensor

EntryPath = tuple[str | int, ...]
Box = tuple[slice, ...]


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
                    manifest.check_save(path / table.TABLE, table.save_of(contents), stored.save)
            return contents, rest

        self._path, self._weights_only = path, weights_only
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

    @torch.no_grad()
    def fill(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read into the tensors by entry, each rank its shards; replace other values. All ranks call this together."""

        def read() -> None:
            for entry, value in wanted.items():
                if not isinstance(value, Tensor):
                    wanted[entry] = self._load(entry, None, torch_file.runs_code(self._weights_only))
                    continue
                offsets = [0] * value.dim()
                if isinstance(value, DTensor):
                    (shard,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
                    value, offsets = local_tensor(value), shard.offsets
                for chunk, inside, part in self._parts(entry, offsets, value.shape):
                    value[inside] = self._load(entry, chunk)[part]

        on_all_ranks(read)
        return wanted

    def rows(self, entry: str, start: int, stop: int) -> Tensor:
        """Return ``tensor[start:stop]``; a tensor without dimensions is one row. The last pieces stay in memory."""
        size, dtype = self.tensors[entry].size, self.tensors[entry].properties.dtype
        rows = torch.empty((stop - start, *size[1:]) if size else (), dtype=dtype)
        offsets = [start, *[0] * (len(size) - 1)] if size else []
        parts = list(self._parts(entry, offsets, rows.shape))
        near = {(entry, chunk.offsets) for chunk, _, _ in parts}
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in near}
        for chunk, inside, part in parts:
            key = entry, chunk.offsets
            if key not in self._pieces:
                self._pieces[key] = self._load(entry, chunk)
            rows[inside] = self._pieces[key][part]
        return rows if size else rows.reshape(1)

    def _parts(
        self, entry: str, offsets: Sequence[int], size: Sequence[int]
    ) -> Iterator[tuple[ChunkStorageMetadata, Box, Box]]:
        """Yield the pieces of a tensor that have a part in a box of ``size`` from ``offsets``.

        For each piece: the index of that part in the box, and in the piece.
        """
        for chunk in self.tensors[entry].chunks:
            first = [max(pair) for pair in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, size, chunk.offsets, chunk.sizes, strict=True)
            last = [min(at + length, other + others) for at, length, other, others in ends]
            if all(begin < end for begin, end in zip(first, last, strict=True)):
                yield chunk, _box(first, last, offsets), _box(first, last, chunk.offsets)

    def _load(self, entry: str, chunk: ChunkStorageMetadata | None, runs_code: bool = False) -> Any:
        """Return a piece of a tensor, or a value; an error names the file."""
        place = table.place(self._table, entry, None if chunk is None else chunk.offsets)
        path = self._path / place.relative_path
        try:
            with path.open("rb") as stream:
                stream.seek(place.offset)
                content = io.BytesIO(stream.read(place.length))
            value = torch.load(content, map_location="cpu", weights_only=not runs_code)
            if chunk is not None and value.shape != chunk.sizes:
                raise ValueError(f"a piece of {entry!r} has the shape {tuple(value.shape)}")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{str(path)!r} is missing. Copy the whole folder, or load another checkpoint."
            ) from None
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise torch_file.refusal(path, error, self._weights_only) or ValueError(
                f"{str(path)!r} is damaged, or belongs to another save ({type(error).__name__}: {reason})."
                " Load another checkpoint."
            ) from error
        return value


def _box(first: Sequence[int], last: Sequence[int], offsets: Sequence[int]) -> Box:
    """Return the index of a box within what begins at ``offsets``."""
    return tuple(slice(begin - at, end - at) for begin, end, at in zip(first, last, offsets, strict=True))
