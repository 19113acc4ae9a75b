"""Read the tensors of a checkpoint file, some rows at a time: files of ``torch.save``, safetensors, folders of those.

Files are mapped into memory. Pages that were read count as memory of the process, so a file is mapped anew after every
:data:`WINDOW` bytes.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowprec.extras import require
from lightning_lowprec.fsdp2 import torch_file
from lightning_lowprec.serving.safetensors_file import DTYPES
from lightning_lowprec.serving.shards import INDEX
from lightning_lowprec.serving.source import Shape, Source
from lightning_lowprec.tools.stored_weights import WEIGHT_KEYS, find_weights, unreadable

WINDOW: Final = 256 * 1024**2


class MappedFiles(Source):
    """Tensors that are read from mapped memory."""

    def __init__(self) -> None:
        self._read = 0

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if self._read > WINDOW:
            self._reopen()
            self._read = 0
        tensor = self._tensor(name)
        part = tensor[start:stop] if tensor.dim() else tensor.reshape(1)
        self._read += part.numel() * part.element_size()
        return part

    @abstractmethod
    def _reopen(self) -> None:
        """Give the mapped memory back."""

    @abstractmethod
    def _tensor(self, name: str) -> Tensor:
        """Return a tensor in mapped memory."""


@final
class TorchFile(MappedFiles):
    """A file of the Trainer, of ``fabric.save`` or of ``torch.save``.

    Args:
        path: the file, whose checksums are compared.
        key: the key of the weights; None: ``state_dict``, ``model``, or the top.

    Raises:
        ValueError: the file is damaged, or has no weights under the key.
        pickle.UnpicklingError: the file holds objects whose reading can run code.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        super().__init__()
        self._path, self._key = path, key
        torch_file.check_records(path)
        self.content = torch_file.read(path, None, map_location="meta")
        """The whole checkpoint, whose tensors are on the meta device."""
        self._shapes = {n: Shape(t.shape, t.dtype) for n, t in find_weights(self.content, key).items()}
        if not self._shapes:
            keys = ", ".join(map(repr, self.content)) if isinstance(self.content, Mapping) else "no keys"
            raise ValueError(
                f"{str(path)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has: {keys}. Name the"
                " right one with `--key`."
            )
        self._weights: dict[str, Tensor] = {}

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    @override
    def _reopen(self) -> None:
        self._weights = {}

    @override
    def _tensor(self, name: str) -> Tensor:
        if not self._weights:
            self._weights = find_weights(torch_file.read(self._path, None), self._key)
        return self._weights[name]


@final
class SafetensorsFiles(MappedFiles):
    """A file of safetensors, or a folder with several and their index.

    Args:
        path: the file or folder.

    Raises:
        ValueError: there is no such file, or the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._open_files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        for file in _files(path):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118
                self._file_of[name] = file
                part = opened.get_slice(name)
                self._shapes[name] = Shape(torch.Size(part.get_shape()), _DTYPES[part.get_dtype()])
        self._reopen()

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    @override
    def _reopen(self) -> None:
        self._open_files = {}

    @override
    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._opened(self._file_of[name]).get_tensor(name)
        return tensor

    def _opened(self, file: Path) -> Any:
        if file not in self._open_files:
            safetensors = require("safetensors", "a safetensors checkpoint")
            try:
                self._open_files[file] = safetensors.safe_open(file, framework="pt")
            except safetensors.SafetensorError as error:
                raise unreadable(file, error) from error
        return self._open_files[file]


_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [path / name for name in names]
    return [path / "model.safetensors"]
