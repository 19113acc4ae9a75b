"""A folder of safetensors files of at most 5 GB, with an index: written beside its name, and renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from torch import Tensor
from typing_extensions import Self

from lightning_lowprec.checkpoints.weights import INDEX
from lightning_lowprec.serving.safetensors_file import SafetensorsFile, Stored

SHARD_BYTES: Final = 5_000_000_000


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``out`` at the end; after an error or Ctrl-C nothing is left.

    Args:
        out: the new folder.
        size: the bytes that will be written.

    Raises:
        ValueError: ``out`` exists, or the folder around it does not.
        OSError: the disk has not enough space, or ``out`` came to exist in the last moment.
    """
    check_out(out)
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise OSError(
            f"`out={str(out)!r}` needs {size / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB left. Free some, or"
            " choose another disk; nothing was written."
        )
    private = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        aside = private / out.name  # with the usual permissions, which `private` lacks
        aside.mkdir()
        yield aside
        check_out(out)  # another process may have been faster
        os.replace(aside, out)  # raises if `out` has files by now
    finally:
        shutil.rmtree(private, ignore_errors=True)


def check_out(out: Path) -> None:
    """Raise a ValueError if a folder cannot be made at ``out``."""
    if os.path.lexists(out):
        raise ValueError(f"`out={str(out)!r}` exists; expected a new folder. Delete it, or choose another name.")
    if not out.parent.is_dir():
        raise ValueError(f"`out={str(out)!r}` is not valid; expected a folder in a folder that exists.")


@final
class ShardFiles:
    """The files of a folder and, of several files, their index; a context that closes what is open.

    Args:
        folder: an empty folder.
        tensors: all tensors, in the order in which they come.
        metadata: for the headers.
        shard_bytes: the largest size of a file; a larger tensor has a file of its own.
    """

    def __init__(
        self, folder: Path, tensors: Sequence[Stored], metadata: Mapping[str, str], *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        groups = _groups(tensors, shard_bytes)
        names = [_file_name(number, len(groups)) for number in range(len(groups))]
        self._folder, self._metadata = folder, {"format": "pt", **metadata}
        self._tensors = dict(zip(names, groups, strict=True))
        self._file_of = {tensor.name: name for name, group in self._tensors.items() for tensor in group}
        self._left = {name: sum(tensor.size for tensor in group) for name, group in self._tensors.items()}
        self._total = sum(self._left.values())
        self._open: dict[str, SafetensorsFile] = {}

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files that are not complete."""
        for unfinished in self._open.values():
            unfinished.abandon()

    def write(self, name: str, rows: Tensor) -> None:
        """Append the next elements to a tensor, and close the file that is complete with them."""
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = SafetensorsFile(self._folder / file, self._tensors[file], self._metadata)
        self._open[file].write(name, rows)
        self._left[file] -= rows.nbytes
        if not self._left[file]:
            self._open.pop(file).close()

    def finish(self) -> None:
        """Write the index, after the last tensor."""
        assert not any(self._left.values()), "a tensor was not written"
        if len(self._tensors) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _groups(tensors: Sequence[Stored], shard_bytes: int) -> list[list[Stored]]:
    groups: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.size
    return groups


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
