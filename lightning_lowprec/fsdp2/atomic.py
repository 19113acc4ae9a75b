"""A checkpoint on disk is complete or absent, and the one it replaces stays until it is.

    .NAME.saving                      written first, by all ranks
    NAME -> NAME.kept-while-saving    a folder that is there already steps aside (a file is replaced in one go)
    .NAME.saving -> NAME
    NAME.kept-while-saving            is deleted last

Whatever moment a run is killed in, one complete checkpoint is there, and :func:`find` says where. What a killed run
left is cleaned up when the same name is saved or removed next. The name of the kept one begins and ends as the
checkpoint's own, so that ``ckpt_path="last"`` of the Trainer finds it too.

Rank 0 alone renames. All ranks enter :func:`replacing`, and all leave it with the same outcome: if one failed, all
raise.
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
"""In a folder: everything that is no tensor of model or optimizer. Lightning's name."""
_OURS: Final = (META, ".metadata")  # and *.distcp: what a sharded checkpoint consists of


def aside(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.saving")


def kept(path: Path) -> Path:
    """Where the one before waits while a folder is renamed."""
    return path.with_name(f"{path.stem}.kept-while-saving{path.suffix}")


def find(path: Path) -> Path:
    """The complete checkpoint that ``path`` names: itself, or the one before, if a run was killed between two renames.

    Raises:
        FileNotFoundError: there is neither.
    """
    if path.exists():
        return path
    if kept(path).exists():
        return kept(path)
    raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}.")


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is the folder of a sharded checkpoint."""
    return path.is_dir() and (path / META).is_file()


@contextmanager
def replacing(path: Path, *, folder: bool) -> Iterator[Path]:
    """Write a checkpoint to the path that this yields; when all ranks are done, it becomes ``path``.

    Entered and left by all ranks of the default process group together.

    Args:
        path: what to create or to replace; the same on all ranks, in a folder that all of them see.
        folder: whether a folder is written, by all ranks (it is there already), or a file, by rank 0.

    Raises:
        IsADirectoryError: ``path`` is a folder with anything in it but a checkpoint.
        RuntimeError: another rank failed.
    """
    on_rank_zero(lambda: _prepare(path, folder))
    error: Exception | None = None
    try:
        yield aside(path)
    except Exception as failure:
        error = failure
    errors = _all_errors(error)
    if any(errors):
        if _rank() == 0:
            _delete(aside(path))
        if error is not None:
            raise error
        rank, message = next((rank, e) for rank, e in enumerate(errors) if e)
        raise RuntimeError(f"{str(path)!r} was not saved: rank {rank} failed with {message}.")
    on_rank_zero(lambda: _commit(path))


def remove(path: Path) -> None:
    """Delete a checkpoint, and what a killed run may have left of it; on rank 0 alone."""
    for leftover in (path, aside(path), kept(path)):
        _delete(leftover)


def on_rank_zero(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, on all ranks; if it raises there, it raises everywhere."""
    outcome: list[Any] = [None, None]
    if _rank() == 0:
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
    _check_ours(path)
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
    if os.path.lexists(old):
        _keep_foreign(old, path)
        _delete(old)


def _check_ours(path: Path) -> None:
    """Before a folder is replaced: it is a checkpoint, or empty."""
    if path.is_dir() and not path.is_symlink() and not is_sharded(path):
        inside = sorted(entry.name for entry in path.iterdir() if not _is_ours(entry))
        if inside:
            raise IsADirectoryError(
                f"{str(path)!r} is a folder that holds no checkpoint but {', '.join(inside[:3])}; saving there would"
                " delete that. Choose another path."
            )


def _is_ours(entry: Path) -> bool:
    return entry.name in _OURS or entry.suffix == ".distcp"


def _keep_foreign(old: Path, new: Path) -> None:
    """What somebody else put into a checkpoint's folder moves to the new one."""
    if old.is_dir() and new.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not _is_ours(entry) and not os.path.lexists(new / entry.name):
                entry.rename(new / entry.name)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _sync(path: Path) -> None:
    """Have the system write the checkpoint out before its name says that it is there."""
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _all_errors(error: Exception | None) -> list[str | None]:
    mine = None if error is None else f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return [mine]
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    return errors


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
