"""Write a checkpoint so that it is complete or absent, and so that the old one stays until the new one is complete.

    .NAME.saving                      written first, by all ranks
    NAME -> NAME.kept-while-saving    only for a folder; a file is replaced by one rename
    .NAME.saving -> NAME
    NAME.kept-while-saving            deleted last

A run may be killed at any moment: one complete checkpoint is always there, and :func:`find` says where. The next save
or removal of the same name deletes what a killed run has left. The name of the kept checkpoint begins and ends like
the checkpoint's name, so ``ckpt_path="last"`` of the Trainer finds the kept checkpoint too.

Only rank 0 renames. All ranks enter :func:`replacing`, and all leave it with the same outcome: if one rank fails, the
incomplete checkpoint is deleted, the old one stays, and all ranks raise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_lowprec.checkpoints.agreement import gathered, on_rank_zero, rank_and_ranks
from lightning_lowprec.checkpoints.manifest import MANIFEST, META


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

    Raises:
        OSError: a rank could not write; on all ranks. The message names the rank and the reason.
        RuntimeError: a rank failed otherwise. On that rank its own exception is raised.
    """
    is_rank_zero = rank_and_ranks()[0] == 0
    on_rank_zero(lambda: _check_folder(path))
    with _all_or_none(path):
        if is_rank_zero:
            _prepare(path, folder)
    with _all_or_none(path):
        yield aside(path)
    with _all_or_none(path):
        if is_rank_zero:
            _put_in_place(path)
    on_rank_zero(lambda: _delete_kept(path))


def remove(path: Path) -> None:
    """Delete a checkpoint and the leftovers of killed runs; called on rank 0 only."""
    for leftover in (path, aside(path), kept(path)):
        _delete(leftover)


class _Reason(NamedTuple):
    """Why a rank failed; ``errno`` is None if the reason is no OSError, or has no number."""

    text: str
    errno: int | None
    is_os_error: bool


@contextmanager
def _all_or_none(path: Path) -> Iterator[None]:
    """If a rank fails in this context, delete the incomplete checkpoint and raise, on all ranks."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's exception derives from BaseException alone
        failure = error
    rank, _ = rank_and_ranks()
    own = failure.failures.get(rank, (None,))[0] if isinstance(failure, CheckpointException) else failure
    reasons = gathered(None if own is None else _reason(own))
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if failed:
        _fail(path, own, failed, is_of_torch=isinstance(failure, CheckpointException))
    if failure is not None:  # torch reports a rank that does not exist
        raise RuntimeError(f"{str(path)!r} was not saved: {failure}") from failure


def _fail(path: Path, own: BaseException | None, failed: dict[int, _Reason], *, is_of_torch: bool) -> NoReturn:
    """Delete the incomplete checkpoint and raise; ``own`` is what went wrong on this rank."""
    is_whole = on_rank_zero(lambda: _clean_up(path))
    if rank_and_ranks()[0] > 0:
        _clean_up(path)  # a folder of a disk that rank 0 does not see
    if dist.is_initialized():
        dist.barrier()
    rank, reason = next(iter(failed.items()))
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    before = "the earlier checkpoint of this name is whole" if is_whole else "there is no earlier one of this name"
    message = f"{str(path)!r} was not saved: rank {rank}: {reason.text}{more}; {before}."
    if isinstance(own, Exception) and not is_of_torch and not isinstance(own, OSError):
        own.add_note(message)
        raise own
    if own is not None and not isinstance(own, Exception):
        raise own  # KeyboardInterrupt
    if not all(reason.is_os_error for reason in failed.values()):
        raise RuntimeError(message) from own
    error = OSError(message)
    error.errno = next((reason.errno for reason in failed.values() if reason.errno is not None), None)
    raise error from own


def _reason(error: BaseException) -> _Reason:
    is_os_error = isinstance(error, OSError)
    text = str(error) if is_os_error else f"{type(error).__name__}: {error}"
    return _Reason(text, getattr(error, "errno", None), is_os_error)


def _clean_up(path: Path) -> bool:
    """Delete the incomplete checkpoint as far as possible; return whether there is an earlier one."""
    if aside(path).is_dir():
        shutil.rmtree(aside(path), ignore_errors=True)
    else:
        with suppress(OSError):
            aside(path).unlink()
    return path.exists() or kept(path).exists()


def _check_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink() and not (path / META).is_file():
        inside = sorted(entry.name for entry in path.iterdir() if not _is_own_file(entry))
        if inside:
            raise IsADirectoryError(
                f"{str(path)!r} is a folder that holds no checkpoint but {', '.join(inside[:3])}; saving there would"
                " delete that. Choose another path."
            )


def _prepare(path: Path, folder: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete(aside(path))
    if folder:
        aside(path).mkdir()


def _put_in_place(path: Path) -> None:
    new, old = aside(path), kept(path)
    _sync(new)
    moved = path.is_dir() or (os.path.lexists(path) and new.is_dir())
    if moved:
        _delete(old)
        path.rename(old)
    try:
        new.replace(path)
    except OSError:
        if moved:
            old.rename(path)
        raise


def _delete_kept(path: Path) -> None:
    """Delete the old checkpoint, but not what others put into its folder."""
    old = kept(path)
    if old.is_dir() and path.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not _is_own_file(entry) and not os.path.lexists(path / entry.name):
                entry.rename(path / entry.name)  # no part of a checkpoint, such as a user's notes
    _delete(old)


def _is_own_file(entry: Path) -> bool:
    return entry.name in (META, MANIFEST, ".metadata") or entry.suffix == ".distcp"


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
