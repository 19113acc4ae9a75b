"""Write a folder of safetensors files of at most 5 GB, with an index, beside its name; rename it when it is complete.

A file is written some rows at a time; the library's own writer holds all tensors of a file in memory.

    8 bytes: length of the header | header, JSON: {name: {dtype, shape, data_offsets}} | data, without gaps

Tensors of wider dtypes lie first, as the library orders them, so that every tensor is aligned.

Rank 0 writes, and an error of rank 0 is raised on every rank. A sharded model is read by all ranks together
(:class:`OneWriter`). A model that every rank has is read by rank 0 alone; other ranks that want it written too wait for
the result (:func:`first_writes`).
"""

import json
import math
import os
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_lowprec.checkpoints.agreement import on_all_ranks, rank_and_ranks
from lightning_lowprec.checkpoints.weights import INDEX
from lightning_lowprec.messages import in_units
from lightning_lowprec.private.fsdp2 import default_store

T = TypeVar("T")
_WAIT: Final = timedelta(days=1)
SHARD_BYTES: Final = 5_000_000_000
_DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_HEADER_ALIGNMENT: Final = 8
_calls: Counter[str] = Counter()


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(tensors: Sequence[Stored]) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file, and the position in the file at which each tensor begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    at = 0
    for tensor in sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name)):
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        begins[tensor.name] = at
        at += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``out`` at the end; after an error or Ctrl-C nothing is left."""
    check_out(out)
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise OSError(
            f"`out={str(out)!r}` needs {in_units(size)}, and its disk has {in_units(free)} left. Free some, or"
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
    """The files of an empty folder and, of several files, their index; a context that closes what is open.

    The tensors come in their order. ``progress`` is called with the number of bytes after each write.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[Stored],
        shard_bytes: int,
        progress: Callable[[int], object],
    ) -> None:
        groups: list[list[Stored]] = [[]]
        for tensor in tensors:
            if groups[-1] and sum(other.size for other in groups[-1]) + tensor.size > shard_bytes:
                groups.append([])
            groups[-1].append(tensor)
        count = len(groups)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        self.folder, self._progress = folder, progress
        self._tensors = dict(zip(names if count > 1 else ["model.safetensors"], groups, strict=True))
        self._file_of = {tensor.name: name for name, group in self._tensors.items() for tensor in group}
        self._left = {tensor.name: tensor.size for tensor in tensors}
        self._total = sum(self._left.values())
        self._at: dict[str, int] = {}
        """By tensor of a file that was begun: the position of the next elements."""
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for unfinished in self._open.values():
            with suppress(OSError):  # that the last bytes do not fit on the disk is no second error
                unfinished.close()

    def write(self, name: str, rows: Tensor) -> None:
        """Append the next elements, (...) on any device, to a tensor; close the file that is complete with them."""
        file = self._file_of[name]
        if not rows.numel():  # the file may be closed already
            return
        if file not in self._open:
            start, begins = header(self._tensors[file])
            self._at |= begins
            self._open[file] = (self.folder / file).open("wb")
            self._open[file].write(start)
        content: Any = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert content.nbytes <= self._left[name], name
        self._open[file].seek(self._at[name])
        self._open[file].write(memoryview(content))
        self._at[name] += content.nbytes
        self._left[name] -= content.nbytes
        if not any(self._left[tensor.name] for tensor in self._tensors[file]):
            self._open.pop(file).close()
        self._progress(rows.nbytes)

    def finish(self) -> None:
        """Write files without a value, and the index, after the last tensor."""
        assert not any(self._left.values()), "a tensor was not written"
        for file, tensors in self._tensors.items():
            if not any(tensor.size for tensor in tensors):
                (self.folder / file).write_bytes(header(tensors)[0])
        if len(self._tensors) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


# ---- one rank writes


def first_writes(name: str, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result, or raise its error, on every rank that calls this.

    This is no collective, because rank 0 may be the only rank that exports: the outcome goes through the store of the
    process group, under the ``name`` of what is written.
    """
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return action()
    store = default_store()
    _calls[name] += 1
    key = f"lightning_lowprec/{name}/{_calls[name]}"
    if rank != 0:
        store.wait([key], _WAIT)
        result, failure = pickle.loads(store.get(key))
        if failure is not None:
            raise failure
        return cast(T, result)
    try:
        done = action()
    except Exception as error:
        store.set(key, pickle.dumps((None, type(error)(*error.args))))
        raise
    store.set(key, pickle.dumps((done, None)))
    return done


@final
class OneWriter:
    """The rank that writes: rank 0 if all ranks read together (``is_shared``), else this rank, which is alone."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared and dist.is_initialized()
        self._writes = not self._is_shared or dist.get_rank() == 0

    def on_writer(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on the rank that writes, and return its result there; None elsewhere. An error is shared."""

        def mine() -> T | None:
            return action() if self._writes else None

        return on_all_ranks(mine) if self._is_shared else mine()

    def take(
        self, chunks: Iterable[tuple[str, Tensor]], write: Callable[[str, Tensor], None] | None, *, agree_after: int
    ) -> None:
        """Read all chunks, the same names and shapes on every rank, and hand each to ``write`` on the rank that writes.

        Reading is a collective: after an error of ``write`` its rank reads on, until all ranks agree.
        """
        failure: Exception | None = None
        left = agree_after
        for name, rows in chunks:
            if write is not None and failure is None:
                try:
                    write(name, rows)
                except Exception as error:
                    failure = error
            left -= rows.nbytes
            if left <= 0 or (failure is not None and not self._is_shared):
                self._agree(failure)
                left = agree_after
        self._agree(failure)

    def _agree(self, failure: Exception | None) -> None:
        def mine() -> None:
            if failure is not None:
                raise failure

        self.on_writer(mine)
