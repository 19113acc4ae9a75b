"""Write a checkpoint so that it is complete or absent, and so that the old one stays until the new one is complete.

    .NAME.saving                      written first, by all ranks
    NAME -> NAME.kept-while-saving    only for a folder; a file is replaced by one rename
    .NAME.saving -> NAME
    NAME.kept-while-saving            deleted last

A run may be killed at any moment: one complete checkpoint is always there, and :func:`find` says where. The next save
or removal of the same name deletes what a killed run has left. The name of the kept checkpoint begins and ends like
the checkpoint's name, so ``ckpt_path="last"`` of the Trainer finds the kept checkpoint too.

Only rank 0 renames. All ranks enter :func:`replacing`, and all leave it with the same outcome: if one rank fails, all
ranks raise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import distributed as dist

T = TypeVar("T")
META: Final = "meta.pt"
"""The file in a folder that holds everything but the tensors of model and optimizers; the name is Lightning's."""


def aside(path: Path) -> Path:
    """Return the path where a checkpoint is written until it is complete."""
    return path.with_name(f".{path.name}.saving")


def kept(path: Path) -> Path:
    """Return the path where the old checkpoint stays while a folder is renamed."""
    return path.with_name(f"{path.stem}.kept-while-saving{path.suffix}")


def find(path: Path) -> Path:
    """Return the complete checkpoint of this name: ``path``, or the old one if a run was killed between two renames."""
    found = path if path.exists() else kept(path)
    if not found.exists():
        raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}.")
    if found.is_dir() and not (found / META).is_file():
        raise ValueError(
            f"{str(path)!r} is a folder without {META!r}, so it is no sharded checkpoint of Lightning or of this"
            " package. Give the folder of a sharded checkpoint, or the file of a full one."
        )
    return found


@contextmanager
def replacing(path: Path, *, folder: bool) -> Iterator[Path]:
    """Yield a path to write a checkpoint to; when all ranks are done, rename that path to ``path``.

    All ranks of the default process group enter and leave this context together, with the same path. All of them write
    into a ``folder``, which exists already, or rank 0 writes a file.
    """
    on_rank_zero(lambda: _prepare(path, folder))
    error: Exception | None = None
    try:
        yield aside(path)
    except Exception as failure:
        error = failure
    errors: list[Any] = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        own, errors = errors[0], [None] * dist.get_world_size()
        dist.all_gather_object(errors, own)
    if any(errors):
        on_rank_zero(lambda: _delete(aside(path)))
        if error is not None:
            raise error
        rank, message = next((rank, e) for rank, e in enumerate(errors) if e)
        raise RuntimeError(f"{str(path)!r} was not saved: rank {rank} failed with {message}.")
    on_rank_zero(lambda: _commit(path))


def remove(path: Path) -> None:
    """Delete a checkpoint and the leftovers of killed runs; called on rank 0 only."""
    for leftover in (path, aside(path), kept(path)):
        _delete(leftover)


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0, and return its result or raise its error on all ranks."""
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def _prepare(path: Path, folder: bool) -> None:
    if path.is_dir() and not path.is_symlink() and not (path / META).is_file():
        inside = sorted(entry.name for entry in path.iterdir() if not _is_own_file(entry))
        if inside:
            raise IsADirectoryError(
                f"{str(path)!r} is a folder that holds no checkpoint but {', '.join(inside[:3])}; saving there would"
                " delete that. Choose another path."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete(aside(path))
    if folder:
        aside(path).mkdir()


def _commit(path: Path) -> None:
    new, old = aside(path), kept(path)
    _sync(new)
    if path.is_dir() or (os.path.lexists(path) and new.is_dir()):
        _delete(old)
        path.rename(old)
    new.replace(path)
    if old.is_dir() and path.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not _is_own_file(entry) and not os.path.lexists(path / entry.name):
                entry.rename(path / entry.name)  # no part of a checkpoint, such as a user's notes
    _delete(old)


def _is_own_file(entry: Path) -> bool:
    return entry.name in (META, ".metadata") or entry.suffix == ".distcp"


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _sync(path: Path) -> None:
    """Flush the checkpoint to disk before its final name appears."""
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
