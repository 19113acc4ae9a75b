"""Read the weights of a checkpoint some rows at a time: files of ``torch.save``, safetensors, folders of shards.

Files are mapped into memory, so a row is read from disk when it is used.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowprec.checkpoints import files
from lightning_lowprec.checkpoints.folder import META, ShardFolder
from lightning_lowprec.checkpoints.save import find
from lightning_lowprec.extras import require

WEIGHT_KEYS: Final = ("state_dict", "model")
"""The keys under which the Trainer and, by convention, Lightning's strategies and Fabric users save the weights."""
SAFETENSORS: Final = ".safetensors"
FILE_ENDINGS: Final = (".ckpt", ".pt", ".pth", ".bin", SAFETENSORS)
INDEX: Final = "model.safetensors.index.json"


class Shape(NamedTuple):
    """The shape and the dtype of a tensor."""

    size: torch.Size
    dtype: torch.dtype


class Source(ABC):
    """Tensors by the names of the model's state dict, read some rows at a time."""

    shapes: Mapping[str, Shape]
    """All tensors."""
    content: Any = None
    """What the checkpoint holds beside or around the tensors."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return ``tensor[start:stop]``, values; a tensor without dimensions is one row. Valid until the next call."""

    @final
    def whole(self, name: str) -> Tensor:
        """Return all rows, in the shape of the tensor."""
        size = self.shapes[name].size
        return self.rows(name, 0, size[0] if size else 1).reshape(size)


def open_weights(path: Path, key: str | None = None) -> Source:
    """Open a checkpoint, whose checksums are compared, if it has some; ``key`` is that of the weights.

    It is a file of the Trainer, of ``fabric.save`` or of ``torch.save``; a file of safetensors, or a folder with
    several and their index; a folder of ``strategy="fsdp2"`` or of Lightning's strategies.
    """
    if path.is_dir():
        is_sharded = (path / META).is_file() or not any(path.glob(f"*{SAFETENSORS}"))
        return _Folder(path, key) if is_sharded else _Safetensors(path, key)
    if not path.is_file():
        raise ValueError(f"`checkpoint={str(path)!r}` is no file and no folder; expected a checkpoint.")
    if path.suffix == SAFETENSORS:
        return _Safetensors(path, key)
    files.check_records(path)
    return _TorchFile(path, key)


def check_file(field: str, path: Path) -> None:
    """Raise a ValueError if there is no such file, with another remedy for the folder of a sharded checkpoint."""
    if path.is_dir():
        raise ValueError(
            f"`{field}={str(path)!r}` is a folder; expected a file. Load a sharded checkpoint with `strategy='fsdp2'`,"
            " and save it as one file with `FSDP2Strategy(state_dict_type='full')`."
        )
    if not path.is_file():
        raise ValueError(f"`{field}={str(path)!r}` is not a file; expected a checkpoint.")


def find_weights(content: Any, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors under ``key`` in a loaded checkpoint; None means ``state_dict``, ``model``, or the top."""
    if not isinstance(content, Mapping):
        return {}
    top = next((content[name] for name in WEIGHT_KEYS if isinstance(content.get(name), Mapping)), content)
    entries = top if key is None else content.get(key)
    if not isinstance(entries, Mapping):
        return {}
    return {name: value for name, value in entries.items() if isinstance(name, str) and isinstance(value, Tensor)}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes and dtypes of tensors by name."""
    return {name: Shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return ``tensor[start:stop]``; a tensor without dimensions is one row."""
    return tensor[start:stop] if tensor.dim() else tensor.reshape(1)


@final
class _TorchFile(Source):
    def __init__(self, path: Path, key: str | None) -> None:
        self.content = files.read(path, None)
        self._tensors = find_weights(self.content, key)
        self.shapes = shapes_of(self._tensors)
        if not self._tensors:
            is_dict = isinstance(self.content, Mapping)
            raise _no_weights(path, key, ", ".join(map(repr, self.content)) if is_dict else type(self.content).__name__)

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return rows_of(self._tensors[name].detach(), start, stop)


@final
class _Safetensors(Source):
    """Files of safetensors, which are closed after each read: pages that were read count as memory of the process."""

    def __init__(self, path: Path, key: str | None) -> None:
        self.shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Path] = {}
        index = path / INDEX
        names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
        for file in [path / name for name in sorted(set(names))] if path.is_dir() else [path]:
            with _safetensors(file) as content:
                for name in content.keys():  # noqa: SIM118  # no mapping
                    part = content.get_slice(name)
                    size = torch.Size(part.get_shape())
                    self.shapes[name] = Shape(size, (part[0:0] if size else content.get_tensor(name)).dtype)
                    self._file_of[name] = file
        if key is not None:
            raise _no_weights(path, key, ", ".join(map(repr, self.shapes)))

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        with _safetensors(self._file_of[name]) as content:
            has_rows = len(self.shapes[name].size) > 0
            rows: Tensor = content.get_slice(name)[start:stop] if has_rows else content.get_tensor(name).reshape(1)
            return rows.clone()


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise ValueError(f"{str(file)!r} is missing; expected a file of safetensors.")
    library = require("safetensors", "a safetensors checkpoint")
    try:
        with library.safe_open(file, framework="pt") as content:
            yield content
    except library.SafetensorError as error:
        raise ValueError(f"{str(file)!r} is no file of safetensors, or is damaged ({error}).") from error


@final
class _Folder(Source):
    def __init__(self, path: Path, key: str | None) -> None:
        self._folder = ShardFolder(find(path))
        self.content = self._folder.rest
        roots = {str(keys[0]) for keys in self._folder.paths.values()}
        root = key if key is not None else next((name for name in WEIGHT_KEYS if name in roots), "")
        names = self._folder.names(root)
        self._entries = {name: entry for entry, name in names.items() if entry in self._folder.tensors}
        if not self._entries:
            raise _no_weights(path, key, ", ".join(sorted(roots)))
        stored = {name: self._folder.tensors[entry] for name, entry in self._entries.items()}
        self.shapes = {name: Shape(tensor.size, tensor.properties.dtype) for name, tensor in stored.items()}

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._folder.rows(self._entries[name], start, stop)


def _no_weights(path: Path, key: str | None, keys: str) -> ValueError:
    return ValueError(
        f"{str(path)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has: {keys}. Name the right one"
        " with `--key`."
    )
