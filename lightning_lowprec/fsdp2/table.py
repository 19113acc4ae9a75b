"""The table of contents of a folder of shards: which tensors and values it holds, in pieces, and where they lie.

torch.distributed.checkpoint keeps this table as :class:`Metadata` and stores it as a pickle, ``.metadata``. Here it is
made of plain values, so that it can be stored as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from lightning_lowprec.private.fsdp2 import storage_info

EntryPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Place:
    """A range of bytes in a file of the folder."""

    file: str
    at: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, of ``sizes`` from ``offsets``, and the bytes that hold the part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, in pieces."""

    dtype: torch.dtype
    size: torch.Size
    pieces: tuple[Piece, ...]


Content = StoredTensor | Place


@dataclass(frozen=True)
class Entry:
    """A tensor or another value, and the keys that lead to it in the saved state."""

    path: EntryPath
    content: Content


Table = dict[str, Entry]
"""Entries by the names that torch.distributed.checkpoint gives them."""


def table_of(metadata: Metadata, results: Iterable[WriteResult]) -> Table:
    """Return the table of what was just written."""
    places = {
        result.index: Place(result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length)
        for result in results
    }
    table: Table = {}
    for name, stored in metadata.state_dict_metadata.items():
        content: Content
        if isinstance(stored, TensorStorageMetadata):
            pieces = (
                Piece(tuple(c.offsets), tuple(c.sizes), places[MetadataIndex(name, c.offsets)]) for c in stored.chunks
            )
            content = StoredTensor(stored.properties.dtype, torch.Size(stored.size), tuple(pieces))
        else:
            content = places[MetadataIndex(name)]
        table[name] = Entry(tuple(metadata.planner_data[name]), content)
    return table


def metadata_of(table: Table) -> Metadata:
    """Return the table as torch.distributed.checkpoint reads it."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, entry in table.items():
        if isinstance(entry.content, Place):
            stored[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _info(entry.content)
            continue
        chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.content.pieces]
        properties = TensorProperties(dtype=entry.content.dtype)
        stored[name] = TensorStorageMetadata(properties, entry.content.size, chunks)
        for piece in entry.content.pieces:
            places[MetadataIndex(name, piece.offsets)] = _info(piece.place)
    return Metadata(stored, planner_data={name: entry.path for name, entry in table.items()}, storage_data=places)


def to_json(table: Table) -> dict[str, Any]:
    """Return the table in lists, dicts, strings and numbers."""
    return {name: {"path": list(entry.path), **_content_to_json(entry.content)} for name, entry in table.items()}


def from_json(stored: Mapping[str, Any]) -> Table:
    """Return the table that :func:`to_json` was given.

    Raises:
        KeyError, TypeError, ValueError: ``stored`` is not such a table.
    """
    return {name: Entry(path(entry["path"]), _content_from_json(entry)) for name, entry in stored.items()}


def path(keys: Any) -> EntryPath:
    """Return the keys that lead to an entry, checked."""
    if not isinstance(keys, (list, tuple)) or not keys or not all(isinstance(key, (str, int)) for key in keys):
        raise TypeError(f"the keys {keys!r} are no strings and numbers")
    return tuple(keys)


def place(file: Any, at: Any, length: Any) -> Place:
    """Return a range of bytes in a file of the folder, checked: the file lies in the folder."""
    inside = isinstance(file, str) and not PurePosixPath(file).is_absolute() and ".." not in PurePosixPath(file).parts
    if not inside or not file or "\\" in file:
        raise ValueError(f"the file {file!r} is not in the folder")
    return Place(file, *sizes((at, length)))


def sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or offsets, checked."""
    if not isinstance(values, (list, tuple)) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} are no sizes")
    return tuple(values)


def tensor(dtype: Any, size: Any, pieces: Iterable[Piece]) -> StoredTensor:
    """Return a tensor in pieces, checked."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    found = StoredTensor(dtype, torch.Size(sizes(size)), tuple(pieces))
    if any(len(p.sizes) != len(found.size) or len(p.offsets) != len(found.size) for p in found.pieces):
        raise ValueError(f"the pieces of a tensor of shape {tuple(found.size)} have other dimensions")
    return found


def _info(place: Place) -> Any:
    return storage_info(place.file, place.at, place.length)


def _content_to_json(content: Content) -> dict[str, Any]:
    if isinstance(content, Place):
        return vars(content)
    pieces = [{"offsets": list(p.offsets), "sizes": list(p.sizes), **vars(p.place)} for p in content.pieces]
    return {"dtype": str(content.dtype).removeprefix("torch."), "size": list(content.size), "pieces": pieces}


def _content_from_json(stored: Mapping[str, Any]) -> Content:
    if "dtype" not in stored:
        return place(stored["file"], stored["at"], stored["length"])
    pieces = [
        Piece(sizes(p["offsets"]), sizes(p["sizes"]), place(p["file"], p["at"], p["length"])) for p in stored["pieces"]
    ]
    return tensor(getattr(torch, stored["dtype"], None), stored["size"], pieces)
