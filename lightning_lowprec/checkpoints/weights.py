"""Read the weights of a checkpoint some rows at a time: files of ``torch.save``, safetensors, folders of shards.

Files are mapped into memory, so a row is read from disk when it is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_lowprec.checkpoints import files
from lightning_lowprec.checkpoints.folder import META, ShardFolder
from lightning_lowprec.checkpoints.save import completed, find
from lightning_lowprec.extras import require

WEIGHT_KEYS: Final = ("state_dict", "model")
"""The keys under which the Trainer and, by convention, Lightning's strategies and Fabric users save the weights."""
SAFETENSORS: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"


class Shape(NamedTuple):
    """The shape and the dtype of a tensor."""

    size: torch.Size
    dtype: torch.dtype


@dataclass
class Source:
    """Tensors by the names of the model's state dict, read some rows at a time."""

    shapes: Mapping[str, Shape]
    rows: Callable[[str, int, int], Tensor]
    """Returns ``tensor[start:stop]``, values; a tensor without dimensions is one row. Valid until the next call."""
    content: object = None
    """What the checkpoint holds beside or around the tensors."""

    def whole(self, name: str) -> Tensor:
        """Return all rows, in the shape of the tensor."""
        size = self.shapes[name].size
        return self.rows(name, 0, size[0] if size else 1).reshape(size)


def open_weights(path: Path, key: str | None = None) -> Source:
    """Open a checkpoint, whose checksums are compared, if it has some; ``key`` is that of the weights.

    It is a file of the Trainer, of ``fabric.save`` or of ``torch.save``; a file of safetensors, or a folder with
    several and their index; a folder of ``strategy="fsdp2"`` or of Lightning's strategies.
    """
    path = completed(path) if completed(path).exists() else path  # a run was killed while it replaced a folder
    if path.is_dir():
        is_sharded = (path / META).is_file() or not any(path.glob(f"*{SAFETENSORS}"))
        return _from_folder(path, key) if is_sharded else _from_safetensors(path, key)
    if not path.is_file():
        raise ValueError(f"`checkpoint={str(path)!r}` is no file and no folder; expected a checkpoint.")
    if path.suffix == SAFETENSORS:
        return _from_safetensors(path, key)
    files.check_records(path)
    return _from_torch(path, key)


def find_weights(content: object, key: str | None = None) -> dict[str, Tensor]:
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


def _from_torch(path: Path, key: str | None) -> Source:
    content = files.read(path, None)
    tensors = find_weights(content, key)
    if not tensors:
        is_dict = isinstance(content, Mapping)
        raise _no_weights(path, key, ", ".join(map(repr, content)) if is_dict else type(content).__name__)
    return Source(shapes_of(tensors), lambda name, *span: rows_of(tensors[name].detach(), *span), content)


def _from_safetensors(path: Path, key: str | None) -> Source:
    """Open files of safetensors, which are closed after each read: pages that were read count as memory."""
    shapes: dict[str, Shape] = {}
    file_of: dict[str, Path] = {}
    index = path / INDEX
    names = _files_of(index) if index.is_file() else ["model.safetensors"]
    for file in [path / name for name in sorted(set(names))] if path.is_dir() else [path]:
        with _safetensors(file) as content:
            for name in content.keys():  # noqa: SIM118  # no mapping
                part = content.get_slice(name)
                size = torch.Size(part.get_shape())
                try:
                    shapes[name] = Shape(size, (part[0:0] if size else content.get_tensor(name)).dtype)
                except RuntimeError as error:  # values of 4 bits, two in a byte
                    raise ValueError(
                        f"{name!r} of {str(file)!r} has the format {part.get_dtype()}, which cannot be read here."
                    ) from error
                file_of[name] = file
    if key is not None:
        raise _no_weights(path, key, ", ".join(map(repr, shapes)))

    def rows(name: str, start: int, stop: int) -> Tensor:
        with _safetensors(file_of[name]) as content:
            read = content.get_slice(name)[start:stop] if shapes[name].size else content.get_tensor(name).reshape(1)
            return read.clone()  # type: ignore[no-any-return]

    return Source(shapes, rows)


def _files_of(index: Path) -> list[str]:
    """Return the names of the files in an index of safetensors, all inside of its folder."""
    try:
        content = json.loads(index.read_text())
    except ValueError as error:
        raise ValueError(f"{str(index)!r} is no JSON file: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(
            f"{str(index)!r} has no `weight_map` of names of tensors and of files in the same folder; it is damaged, or"
            " is no index of safetensors."
        )
    return names


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


def _from_folder(path: Path, key: str | None) -> Source:
    folder = ShardFolder(find(path))
    roots = {str(keys[0]) for keys in folder.paths.values()}
    root = key if key is not None else next((name for name in WEIGHT_KEYS if name in roots), "")
    entries = {name: entry for entry, name in folder.names(root).items() if entry in folder.tensors}
    if not entries:
        raise _no_weights(path, key, ", ".join(sorted(roots)))
    stored = {name: folder.tensors[entry] for name, entry in entries.items()}
    shapes = {name: Shape(tensor.size, tensor.properties.dtype) for name, tensor in stored.items()}
    return Source(shapes, lambda name, *span: folder.rows(entries[name], *span), folder.rest)


def _no_weights(path: Path, key: str | None, keys: str) -> ValueError:
    return ValueError(
        f"{str(path)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has: {keys}. Name the right one"
        " with `--key`."
    )
