"""Read the tensors of a folder of shards (torch.distributed.checkpoint), piece by piece, in one process."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowprec.fsdp2 import atomic, foreign_table, manifest, torch_file
from lightning_lowprec.fsdp2.optimizer_state import clean
from lightning_lowprec.fsdp2.table import Piece, StoredTensor
from lightning_lowprec.serving.source import Shape, Source
from lightning_lowprec.tools.stored_weights import WEIGHT_KEYS


@final
class ShardedFolder(Source):
    """A folder of this package's ``strategy="fsdp2"``, or of Lightning's strategies.

    Args:
        path: the folder, whose files are compared with their checksums, if it has some.
        key: the key of the weights; None: ``state_dict``, or ``model``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or there are no weights under the key.
        pickle.UnpicklingError: a file holds objects whose reading can run code.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        self._path = atomic.find(path)
        stored = manifest.read(self._path, verify=True)
        if stored is not None:
            stored.check(self._path, verify=True)
        table = foreign_table.read(self._path, None) if stored is None else stored.table
        self.content: Any = torch_file.read(self._path / manifest.META, None)
        """What is not sharded: counters, and the state of plugins and callbacks."""
        roots = {str(entry.path[0]) for entry in table.values()}
        root = key if key is not None else next((name for name in WEIGHT_KEYS if name in roots), "")
        self._tensors = {
            clean(".".join(map(str, entry.path[1:]))): entry.content
            for entry in table.values()
            if entry.path[0] == root and isinstance(entry.content, StoredTensor)
        }
        if not self._tensors:
            raise ValueError(
                f"{str(path)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has:"
                f" {', '.join(sorted(roots))}. Name the right one with `--key`."
            )
        self._name = ""
        self._pieces: dict[Piece, Tensor] = {}

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return {name: Shape(tensor.size, tensor.dtype) for name, tensor in self._tensors.items()}

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        stored = self._tensors[name]
        if not stored.size:
            return self._loaded(stored.pieces[0]).reshape(1)
        wanted = [p for p in stored.pieces if p.offsets[0] < stop and p.offsets[0] + p.sizes[0] > start]
        same = self._name == name
        self._pieces = {piece: self._pieces[piece] for piece in wanted if same and piece in self._pieces}
        self._name = name
        out = torch.empty((stop - start, *stored.size[1:]), dtype=stored.dtype)
        for piece in wanted:
            if piece not in self._pieces:
                self._pieces[piece] = self._loaded(piece)
            first, last = max(start, piece.offsets[0]), min(stop, piece.offsets[0] + piece.sizes[0])
            beside = [slice(at, at + size) for at, size in zip(piece.offsets[1:], piece.sizes[1:], strict=True)]
            part = self._pieces[piece][first - piece.offsets[0] : last - piece.offsets[0]]
            out[(slice(first - start, last - start), *beside)] = part
        return out

    def _loaded(self, piece: Piece) -> Tensor:
        file = self._path / piece.place.file
        with file.open("rb") as stream:
            stream.seek(piece.place.at)
            content = io.BytesIO(stream.read(piece.place.length))
        tensor: Tensor = torch.load(content, weights_only=True)
        return tensor
