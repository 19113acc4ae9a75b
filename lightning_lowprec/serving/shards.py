"""A folder of safetensors files of at most 5 GB, with an index: written beside its name, and renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch import Tensor
from tqdm import tqdm

from lightning_lowprec.serving.safetensors_file import SafetensorsFile, Stored

SHARD_BYTES: Final = 5_000_000_000
INDEX: Final = "model.safetensors.index.json"


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``out`` at the end; after an error or Ctrl-C nothing is left.

    Args:
        out: the new folder.
        size: the bytes that will be written.

    Raises:
        ValueError: ``out`` exists, or the folder around it does not.
        OSError: the disk has not enough space.
    """
    check_out(out)
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise OSError(
            f"`out={str(out)!r}` needs {size / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB left. Free some, or"
            " choose another disk; nothing was written."
        )
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir()
    try:
        yield aside
        os.replace(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_out(out: Path) -> None:
    """Raise a ValueError if a folder cannot be made at ``out``."""
    if os.path.lexists(out):
        raise ValueError(f"`out={str(out)!r}` exists; expected a new folder. Delete it, or choose another name.")
    if not out.parent.is_dir():
        raise ValueError(f"`out={str(out)!r}` is not valid; expected a folder in a folder that exists.")


def write(
    folder: Path,
    tensors: Sequence[Stored],
    chunks: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write the files and, of several, their index.

    Args:
        folder: an empty folder.
        tensors: all tensors, in the order of ``chunks``.
        chunks: names, and the next elements of the tensor of that name.
        metadata: for the headers.
        shard_bytes: the largest size of a file; a larger tensor has a file of its own.
        progress: whether a bar is shown.
    """
    groups = _groups(tensors, shard_bytes)
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    file_of = {tensor.name: names[number] for number, group in enumerate(groups) for tensor in group}
    total = sum(tensor.size for tensor in tensors)
    files: dict[str, SafetensorsFile] = {}
    left = {name: sum(t.size for t in group) for name, group in zip(names, groups, strict=True)}
    by_name = dict(zip(names, groups, strict=True))
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=not progress) as bar:
            for name, rows in chunks:
                file = file_of[name]
                if file not in files:
                    files[file] = SafetensorsFile(folder / file, by_name[file], {"format": "pt", **metadata})
                files[file].write(name, rows)
                left[file] -= rows.numel() * rows.element_size()
                bar.update(rows.numel() * rows.element_size())
                if not left[file]:
                    files.pop(file).close()
    finally:
        for unfinished in files.values():
            unfinished.abandon()
    assert not any(left.values()), "a tensor was not written"
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


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
