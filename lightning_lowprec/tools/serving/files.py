"""Read the tensors of a checkpoint file some rows at a time: files of ``torch.save``, safetensors, folders of those.

Only the rows that are asked for are read. (To map a file into memory needs free memory for the whole file, on some
machines, and pages that were read count as memory of the process.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowprec.fsdp2 import torch_file
from lightning_lowprec.private.torch_files import place_of, without_values
from lightning_lowprec.serving.safetensors_file import DTYPES
from lightning_lowprec.serving.shards import INDEX
from lightning_lowprec.serving.source import Shape, Source
from lightning_lowprec.tools.stored_weights import WEIGHT_KEYS, find_weights, unreadable

_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}
_LENGTH: Final = 8  # bytes before a header of safetensors


class StoredRows(NamedTuple):
    """A contiguous tensor in a file."""

    file: Path
    at: int
    """The first byte."""
    shape: Shape


def read_rows(place: StoredRows, start: int, stop: int) -> Tensor:
    """Return ``tensor[start:stop]``; a tensor without dimensions is one row.

    Raises:
        ValueError: the file is too short.
    """
    size, dtype = place.shape
    rows = torch.empty((stop - start, *size[1:]), dtype=dtype)
    content: Any = rows.reshape(-1).view(torch.uint8).numpy()
    row = content.nbytes // max(1, stop - start)
    with place.file.open("rb") as stream:
        stream.seek(place.at + start * row)
        if stream.readinto(memoryview(content)) != content.nbytes:
            raise ValueError(f"{str(place.file)!r} is damaged: it ends within a tensor. Load another checkpoint.")
    return rows


@final
class TorchFile(Source):
    """A file of the Trainer, of ``fabric.save`` or of ``torch.save``.

    Args:
        path: the file, whose checksums are compared.
        key: the key of the weights; None: ``state_dict``, ``model``, or the top.

    Raises:
        ValueError: the file is damaged, or has no weights under the key.
        pickle.UnpicklingError: the file holds objects whose reading can run code.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        torch_file.check_records(path)
        with without_values():
            self.content = torch_file.read(path, None, mmap=False)
            """The whole checkpoint, whose tensors have no values."""
        self._path = path
        self._tensors = find_weights(self.content, key)
        if not self._tensors:
            keys = ", ".join(map(repr, self.content)) if isinstance(self.content, Mapping) else "no keys"
            raise ValueError(
                f"{str(path)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has: {keys}. Name the"
                " right one with `--key`."
            )
        self._whole: dict[str, Tensor] = {}
        if any(place_of(tensor) is None for tensor in self._tensors.values()):  # torch's format of before 1.6
            self._whole = find_weights(torch_file.read(path, None), key)

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return {name: Shape(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor, whole = self._tensors[name], self._whole.get(name)
        if whole is not None:
            return whole[start:stop] if whole.dim() else whole.reshape(1)
        place = place_of(tensor)
        assert place is not None
        if tensor.is_contiguous():
            at = place + int(tensor.storage_offset()) * tensor.element_size()
            return read_rows(StoredRows(self._path, at, Shape(tensor.shape, tensor.dtype)), start, stop)
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        stored = read_rows(StoredRows(self._path, place, Shape(torch.Size([count]), tensor.dtype)), 0, count)
        return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[start:stop]


@final
class SafetensorsFiles(Source):
    """A file of safetensors, or a folder with several and their index.

    Args:
        path: the file or folder.

    Raises:
        ValueError: there is no such file, or the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._places = {name: place for file in _files(path) for name, place in _places(file).items()}

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return {name: place.shape for name, place in self._places.items()}

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return read_rows(self._places[name], start, stop)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.is_file():
        return [path / "model.safetensors"]
    return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _places(file: Path) -> dict[str, StoredRows]:
    """Return where the tensors of a file of safetensors lie; `safetensors_file.py` draws the format."""
    if not file.is_file():
        raise ValueError(f"{str(file)!r} is missing; expected a file of safetensors.")
    total = os.path.getsize(file)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH), "little")
            if length > total:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            shape = Shape(torch.Size(entry["shape"]), _DTYPES[entry["dtype"]])
            begin = _LENGTH + length + first
            if last - first != shape.size.numel() * shape.dtype.itemsize or begin + last - first > total:
                raise ValueError(f"{name!r} does not fit into the file")
            found[name] = StoredRows(file, begin, shape)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable(file, error) from error
    return found
