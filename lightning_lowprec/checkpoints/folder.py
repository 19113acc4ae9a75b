"""Read a folder of shards (torch.distributed.checkpoint): open and check the folder, then read tensors or rows of them.

A folder of this package has a manifest, JSON with the size and the CRC-32 of every other file, which are compared
before anything is read. A folder of Lightning's ModelParallelStrategy or FSDPStrategy has none. In both, torch's table
of contents says what is stored, in which pieces, where each piece lies, and how the saved state was nested. The pieces
of a tensor must hold every value once:

    manifest -> sizes, checksums -> meta.pt -> table    :class:`ShardFolder`, on all ranks
    table -> pieces -> given tensors, sharded           :meth:`ShardFolder.fill`, on all ranks
    table -> pieces -> rows of one tensor               :meth:`ShardFolder.rows`, on one rank

The table is a pickle, ``.metadata``, of torch's own :class:`Metadata`. A pickle names the functions and classes that
build its objects, so a pickle can run any code. :func:`read_table` admits the names of torch's tables and no other
name. The pickle never sees torch's classes but classes of one pickle, which build torch's objects: a pickle can change
the attributes of the classes that it sees.
"""

import io
import json
import math
import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_lowprec.checkpoints import files
from lightning_lowprec.checkpoints.agreement import on_all_ranks, rank_and_ranks
from lightning_lowprec.checkpoints.files import FileRecord
from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.private.torch import local_tensor

MANIFEST: Final = "lightning_lowprec.json"
META: Final = "meta.pt"
"""The file that holds everything but the tensors of model and optimizers; the name is Lightning's."""
SHARD: Final = ".distcp"
"""The suffix of torch.distributed.checkpoint."""
SAVE: Final = "lightning_lowprec_save"
"""The key in ``meta.pt`` that says that the folder has a manifest; the value is the format."""
FORMAT: Final = 3
TABLE: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_ENCODING: Final = "_MEM_FORMAT_ENCODING"
_OF_METADATA: Final = (
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "StorageMeta", _ENCODING,
)  # fmt: skip
NAMES: Final = {
    *((_METADATA, name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # of torch before 2.3
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
"""The classes and functions of a table, beside dtypes, paths and the members of an Enum."""
EntryPath = tuple[str | int, ...]
Box = tuple[slice, ...]


@final
class ShardFolder:
    """An open folder. Entries have the names that torch gives them, such as ``model.fc.weight``.

    ``weights_only`` and the errors are those of :func:`lightning_lowprec.checkpoints.files.read`. ``verify`` compares
    the files with the manifest, if the folder has one, before anything is read.
    """

    def __init__(self, path: Path, weights_only: bool | None = None, *, verify: bool = True) -> None:
        records = on_all_ranks(lambda: read_manifest(path)) if verify else None
        on_all_ranks(lambda: _check_files(path, records or {}))

        def read() -> tuple[Metadata, dict[str, object]]:
            rest = files.read(path / META, weights_only)
            table = read_table(path, weights_only)
            if rest.pop(SAVE, None) is not None and verify:
                _check_complete(path, table, records)
            return table, rest

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
    def fill(self, wanted: dict[str, object]) -> dict[str, object]:
        """Read into the tensors by entry, each rank its shards; replace other values. All ranks call this together."""

        def read() -> None:
            for entry, value in wanted.items():
                if not isinstance(value, Tensor):
                    wanted[entry] = self._load(entry, None, files.runs_code(self._weights_only))
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
        """Yield the pieces that have a part in a box of ``size`` from ``offsets``; its indices in box and piece."""
        for chunk in self.tensors[entry].chunks:
            first = [max(pair) for pair in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, size, chunk.offsets, chunk.sizes, strict=True)
            last = [min(at + length, other + others) for at, length, other, others in ends]
            if all(begin < end for begin, end in zip(first, last, strict=True)):
                yield chunk, _box(first, last, offsets), _box(first, last, chunk.offsets)

    def _load(self, entry: str, chunk: ChunkStorageMetadata | None, runs_code: bool = False) -> Any:
        place = _place(self._table, entry, None if chunk is None else chunk.offsets)
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
            raise files.refused_object(path, error, self._weights_only) or ValueError(
                f"{str(path)!r} is damaged, or belongs to another save ({type(error).__name__}: {reason})."
                " Load another checkpoint."
            ) from error
        return value


def _box(first: Sequence[int], last: Sequence[int], offsets: Sequence[int]) -> Box:
    return tuple(slice(begin - at, end - at) for begin, end, at in zip(first, last, offsets, strict=True))


# ---- the manifest


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the size and checksum of every other file, on rank 0, as the last file of the folder."""
    listed = {name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in records.items()}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": listed}))


def read_manifest(folder: Path) -> Mapping[str, FileRecord] | None:
    """Return the size and checksum of every other file; None for a folder without a manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_bytes())
        if not stored["format"] > FORMAT:
            records = {name: FileRecord(r["size"], int(r["crc32"], 16)) for name, r in stored["files"].items()}
            for name, record in records.items():
                if Path(name).name != name:
                    raise ValueError(f"the file {name!r} is not in the folder")
                if stored["files"][name]["crc32"] != f"{record.crc32:08x}":
                    raise ValueError(f"the checksum of {name!r} is not as it was written")
            return records
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}. Load another checkpoint.") from error
    raise ValueError(
        f"{str(path)!r} has the format {stored['format']!r}, and this version of lightning_lowprec reads {FORMAT}."
        " Install a later version."
    )


def _check_files(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Compare this rank's share of the files with the manifest."""
    rank, ranks = rank_and_ranks()
    for name, record in list(records.items())[rank::ranks]:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is missing: the manifest of the checkpoint lists the file. Copy the whole folder, or"
                " load another checkpoint."
            )
        size = path.stat().st_size
        stored = FileRecord(size, files.crc32_of(path) if size == record.size else record.crc32)
        if stored != record:
            raise ValueError(
                f"{str(path)!r} is damaged, or belongs to another save: it has {stored.size} bytes with the CRC-32"
                f" {stored.crc32:08x}, and {record.size} bytes with {record.crc32:08x} were saved. Load another"
                " checkpoint. `verify_checkpoints=False` of the strategy loads the file without this check."
            )


def _check_complete(folder: Path, table: Metadata, records: Mapping[str, FileRecord] | None) -> None:
    """Raise FileNotFoundError without a manifest, ValueError if it does not list a file that is read."""
    path = folder / MANIFEST
    if records is None:
        raise FileNotFoundError(
            f"{str(path)!r} is missing, and the folder was written with it. Copy the whole folder;"
            " `verify_checkpoints=False` of the strategy reads the folder without its manifest."
        )
    read = {META, *(info.relative_path for info in (table.storage_data or {}).values())}
    if unlisted := sorted(read - records.keys()):
        raise ValueError(f"{str(path)!r} is damaged: it does not list {unlisted[0]!r}. Load another checkpoint.")


# ---- the table


def read_table(folder: Path, weights_only: bool | None) -> Metadata:
    """Return the table of contents of a folder; classes other than those of torch's tables are refused by default."""
    path = folder / TABLE
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing: without it the folder cannot be read.")
    try:
        with path.open("rb") as file:
            return _checked(_Reader(file, files.runs_code(weights_only)).load())
    except _Refused as error:
        raise pickle.UnpicklingError(
            f"{str(path)!r} names {error}, which no table of torch.distributed.checkpoint has; to read such a table"
            f" can run code. {files.remedy(weights_only)}"
        ) from None
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{str(path)!r} is damaged, or is no table of contents: {reason}. Load another checkpoint."
        ) from error


def _place(table: Metadata, name: str, offsets: Sequence[int] | None = None) -> Any:
    """Return file, offset and length of a value, or of the piece of a tensor that begins at ``offsets``."""
    assert table.storage_data is not None
    return table.storage_data[MetadataIndex(name, offsets)]


@final
class _Refused(Exception):
    """A name that a table does not have."""


@final
class _Reader(pickle.Unpickler):
    """Builds the objects of a table; other objects only if the user trusts the pickle."""

    def __init__(self, file: IO[bytes], trusted: bool) -> None:
        super().__init__(file)
        self._trusted = trusted

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or a class that stands for a class or function of the pickle."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in NAMES:
            return _stand_in(super().find_class(module, name))
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return _stand_in(vars(pathlib)[f"Pure{name}"])
        if (module, name) == ("builtins", "getattr"):  # the members of an Enum, in some versions of Python
            return _stand_in(lambda _, member: super(_Reader, self).find_class(_METADATA, _ENCODING)[member])
        if self._trusted:
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


def _stand_in(build: Any) -> type:
    """Return a class of one pickle whose instances are what ``build`` returns."""

    def new(_: type, *args: object) -> Any:
        return build(*args) if args else build.__new__(build)

    return type("StandIn", (), {"__new__": new})


def _checked(table: Any) -> Metadata:
    """Return a table whose files lie in its folder and whose pieces have a place; its entries know their keys."""
    keys = table.planner_data
    if not isinstance(table, Metadata) or not isinstance(keys, dict):
        raise ValueError("the plan that wrote the folder does not say how entries are nested")
    table.planner_data = {name: tuple(keys.get(name, (name,))) for name in table.state_dict_metadata}
    for info in (table.storage_data or {}).values():
        file = PurePosixPath(info.relative_path)
        if not file.name or file.is_absolute() or ".." in file.parts or "\\" in info.relative_path:
            raise ValueError(f"the file {info.relative_path!r} is not in the folder")
        if info.transform_descriptors:
            raise ValueError("its tensors are compressed")
    for name, stored in table.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            _place(table, name)
            continue
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise ValueError(f"{stored.properties.dtype!r} is no dtype")
        for chunk in stored.chunks:
            _place(table, name, chunk.offsets)
        if not _covered_once(stored.size, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]):
            raise ValueError(
                f"the pieces of {name!r} do not hold every value of its shape {tuple(stored.size)} exactly once"
            )
    return table


def _covered_once(size: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether pieces, offsets and sizes, fill a tensor of this size without a gap and without an overlap."""
    if any(not len(at) == len(lengths) == len(size) for at, lengths in pieces):
        return False
    boxes = [[(b, b + length) for b, length in zip(*piece, strict=True)] for piece in pieces if 0 not in piece[1]]
    if any(not 0 <= begin < end <= whole for box in boxes for (begin, end), whole in zip(box, size, strict=True)):
        return False
    if sum(math.prod(end - begin for begin, end in box) for box in boxes) != math.prod(size):
        return False
    # compare boxes that share an index along the axis with most cuts
    axis = max(range(len(size)), key=lambda axis: len({box[axis] for box in boxes}), default=0)
    near: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[axis:]):
        near = [other for other in near if other[axis][1] > box[axis][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in near):
            return False
        near.append(box)
    return True
