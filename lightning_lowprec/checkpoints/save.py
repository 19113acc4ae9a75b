"""Save a sharded model and its optimizers so that a checkpoint is complete or absent, and the old one stays until then.

A checkpoint is a file of whole tensors, written by rank 0, or a folder of every rank's shards. Both hold a model under
the names and in the dtypes of its state dict, and optimizer state by the name (or position) of the parameter.

    .NAME.saving                              written first, by all ranks
    .NAME.saving -> NAME                      a file, or the first folder of this name: one rename
    .NAME.saving -> NAME.complete-while-saving -> NAME    a folder that replaces another, deleted in between

A run may be killed at any moment: one complete checkpoint is always there, and :func:`find` says where. The next save
or removal of the same name ends what a killed run has begun. The name of a complete checkpoint begins and ends like
the checkpoint's name, so ``ckpt_path="last"`` of the Trainer finds it too.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, final

from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_lowprec.checkpoints import files
from lightning_lowprec.checkpoints.agreement import gathered, on_rank_zero, rank_and_ranks
from lightning_lowprec.checkpoints.files import CheckedFile, FileRecord
from lightning_lowprec.checkpoints.folder import FORMAT, MANIFEST, META, SAVE, SHARD, TABLE, write_manifest


def model_state(model: nn.Module, *, full: bool) -> dict[str, Any]:
    """Return a model's state dict: whole tensors on rank 0 and nothing elsewhere, or DTensors on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def save(path: Path, shards: Mapping[str, object], rest: Mapping[str, object], *, full: bool) -> None:
    """Write ``shards`` (models and optimizers by key) and ``rest``: a file on rank 0, or a folder on all ranks."""
    with replacing(path, folder=not full) as new:
        if not full:
            _write_folder(new, shards, rest)
        elif dist.get_rank() == 0:
            files.write({**shards, **rest}, new, checked=False)  # torch writes checksums of its own


def _write_folder(folder: Path, shards: Mapping[str, object], rest: Mapping[str, object]) -> None:
    writer = FileSystemWriter(folder)
    writer.fs = file_system = _Files()
    save_shards(dict(shards), storage_writer=writer)
    records = gathered(file_system.records)
    if rank_and_ranks()[0] > 0:
        return
    for rank, of_rank in enumerate(records):
        for name, record in of_rank.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != record.size:
                raise OSError(
                    f"rank 0 does not see the file {name!r} that rank {rank} wrote: the folder of a sharded checkpoint"
                    " must lie on a file system that all ranks share"
                )
    written = {name: record for of_rank in records for name, record in of_rank.items()}
    written[META] = files.write({**rest, SAVE: FORMAT}, folder / META)
    write_manifest(folder, written)


@final
class _Files(FileSystem):
    """Files for writing; ``records`` keeps their sizes and checksums."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[CheckedFile]:
        """Open a file; torch renames the table of contents, which is written as ``.metadata.tmp``."""
        with CheckedFile(Path(path)) as file:
            yield file
        self.records[Path(path).name.removesuffix(".tmp")] = file.record


# ---- completely, or not at all


def aside(path: Path) -> Path:
    """Return the path where a checkpoint is written until it is complete."""
    return path.with_name(f".{path.name}.saving")


def completed(path: Path) -> Path:
    """Return the path where a complete folder waits until the folder that it replaces is deleted."""
    return path.with_name(f"{path.stem}.complete-while-saving{path.suffix}")


def find(path: Path) -> Path:
    """Return the complete checkpoint of this name: ``path``, or the new one if a run was killed between two renames."""
    complete = completed(path) if completed(path).exists() else path
    if not complete.exists():
        raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}.")
    if complete.is_dir() and not (complete / META).is_file():
        raise ValueError(
            f"{str(path)!r} is a folder without {META!r}, so it is no sharded checkpoint of Lightning or of this"
            " package. Give the folder of a sharded checkpoint, or the file of a full one."
        )
    return complete


@contextmanager
def replacing(path: Path, *, folder: bool) -> Iterator[Path]:
    """Yield a path to write a checkpoint to; when all ranks are done, rename that path to ``path``.

    All ranks of the default process group enter and leave this context together, with the same path. All of them write
    into a ``folder``, which exists already, or rank 0 writes a file. If a rank fails, the old checkpoint stays; that
    rank raises its exception, and the others an OSError or a RuntimeError with the rank and the reason.
    """
    is_rank_zero = rank_and_ranks()[0] == 0
    on_rank_zero(lambda: _check_folder(path))
    with _all_or_none(path):
        if is_rank_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            _take_over(path)
            _delete(aside(path))
            if folder:
                aside(path).mkdir()
    with _all_or_none(path):
        yield aside(path)
    with _all_or_none(path):
        if is_rank_zero:
            _put_in_place(path)


def remove(path: Path) -> None:
    """Delete a checkpoint and the leftovers of killed runs; called on rank 0 only."""
    for leftover in (path, aside(path), completed(path)):
        _delete(leftover)


_Reason = tuple[str, int | None, bool]
"""Why a rank failed, the number of a system's error, and whether it is one."""


@contextmanager
def _all_or_none(path: Path) -> Iterator[None]:
    """If a rank fails in this context, delete the incomplete checkpoint and raise, on all ranks."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's exception derives from BaseException alone
        failure = error
    rank, _ = rank_and_ranks()
    here = failure.failures.get(rank, (None,))[0] if isinstance(failure, CheckpointException) else failure
    reason: _Reason | None = None
    if here is not None:
        is_os_error = isinstance(here, OSError)
        text = str(here) if is_os_error else f"{type(here).__name__}: {here}"
        reason = text, getattr(here, "errno", None), is_os_error
    failed = {rank: reason for rank, reason in enumerate(gathered(reason)) if reason is not None}
    if failed:
        _fail(path, here, failed, is_of_torch=isinstance(failure, CheckpointException))
    if failure is not None:  # torch reports a rank that does not exist
        raise RuntimeError(f"{str(path)!r} was not saved: {failure}") from failure


def _fail(path: Path, here: BaseException | None, failed: dict[int, _Reason], *, is_of_torch: bool) -> NoReturn:
    """Delete the incomplete checkpoint and raise; ``here`` is what went wrong on this rank."""
    is_whole = on_rank_zero(lambda: _clean_up(path))
    if rank_and_ranks()[0] > 0:
        _clean_up(path)  # a folder of a disk that rank 0 does not see
    if dist.is_initialized():
        dist.barrier()
    rank, (text, _, _) = next(iter(failed.items()))
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    before = "the earlier checkpoint of this name is whole" if is_whole else "there is no earlier one of this name"
    message = f"{str(path)!r} was not saved: rank {rank}: {text}{more}; {before}."
    if isinstance(here, Exception) and not is_of_torch and not isinstance(here, OSError):
        here.add_note(message)
        raise here
    if here is not None and not isinstance(here, Exception):
        raise here  # KeyboardInterrupt
    if not all(is_os_error for _, _, is_os_error in failed.values()):
        raise RuntimeError(message) from here
    error = OSError(message)
    error.errno = next((errno for _, errno, _ in failed.values() if errno is not None), None)
    raise error from here


def _clean_up(path: Path) -> bool:
    with suppress(OSError):
        _delete(aside(path))
    return path.exists() or completed(path).exists()


def _check_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink() and not (path / META).is_file():
        inside = sorted(entry.name for entry in path.iterdir() if not _is_own_file(entry))
        if inside:
            raise IsADirectoryError(
                f"{str(path)!r} is a folder that holds no checkpoint but {', '.join(inside[:3])}; saving there would"
                " delete that. Choose another path."
            )


def _put_in_place(path: Path) -> None:
    new = aside(path)
    for file in new.iterdir() if new.is_dir() else [new]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # to disk, before its final name appears
    if path.is_dir() or (os.path.lexists(path) and new.is_dir()):
        new.replace(completed(path))
        _take_over(path)
    else:
        new.replace(path)


def _take_over(path: Path) -> None:
    """Let a complete new checkpoint replace the old one, but not what others put into the folder of the old one."""
    new = completed(path)
    if not new.exists():
        return
    if path.is_dir() and not path.is_symlink() and new.is_dir():
        for entry in path.iterdir():
            if not _is_own_file(entry) and not os.path.lexists(new / entry.name):
                entry.rename(new / entry.name)  # no part of a checkpoint, such as a user's notes
    _delete(path)
    new.replace(path)


def _is_own_file(entry: Path) -> bool:
    return entry.name in (META, MANIFEST, TABLE) or entry.suffix == SHARD


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
