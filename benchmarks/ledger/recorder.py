"""Read what the null GPU recorded.

with recording() as log:
step()
log.count("kernel"), log.products(), log.of("sync")
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LIBRARY = "libnullgpu.so"


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that a library asked of the GPU."""

    seconds: float
    """The host's clock."""
    what: str
    """kernel, gemm, memcpy, memset, sync, malloc, free, event, graph, mark, refused or unknown."""
    name: str
    """The kernel's or the call's name; of a memcpy H2D, D2H or D2D; of a mark its text."""
    info: str
    """``key=value`` pairs and flags, separated by blanks."""

    def get(self, key: str) -> str:
        """Return the value of one pair, or "" if the record does not have it."""
        for pair in self.info.split():
            found, _, value = pair.partition("=")
            if found == key:
                return value
        return ""

    def number(self, key: str) -> int:
        """Return the value of one pair as a number; 0 if the record does not have it."""
        return int(self.get(key) or 0)

    @property
    def waits(self) -> bool:
        """Whether the host waits for the GPU here: a synchronisation, or a copy to the host."""
        return self.what == "sync" or (self.what == "memcpy" and self.name == "D2H")


@dataclass
class Log:
    """The records of one stretch of a program; filled when the stretch has ended."""

    records: list[Record] = field(default_factory=list)

    def of(self, *what: str) -> list[Record]:
        """Return the records of these kinds, in order."""
        return [record for record in self.records if record.what in what]

    def count(self, *what: str) -> int:
        """Return how many records are of these kinds."""
        return len(self.of(*what))

    def waits(self) -> list[Record]:
        """Return where the host waits for the GPU."""
        return [record for record in self.records if record.waits]


def on_null_gpu() -> bool:
    """Return whether this process runs on the null GPU."""
    return LIBRARY in os.environ.get("LD_PRELOAD", "")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the null GPU's library; raises RuntimeError in a process that does not run on it."""
    paths = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if LIBRARY in path]
    if not paths:
        raise RuntimeError(
            "this process does not run on the null GPU: start it by python -m benchmarks.ledger.launch COMMAND"
        )
    loaded = ctypes.CDLL(paths[0])
    loaded.nullgpu_count.restype = ctypes.c_long
    return loaded


def mark(text: str) -> None:
    """Put a mark into the records."""
    library().nullgpu_mark(text.encode())


def position() -> int:
    """Return the number of records so far."""
    return int(library().nullgpu_count())


@contextmanager
def recording() -> Iterator[Log]:
    """Record what the body asks of the GPU. Not nested."""
    log, lib = Log(), library()
    lib.nullgpu_forget()
    lib.nullgpu_record(1)
    try:
        yield log
    finally:
        lib.nullgpu_record(0)
        log.records = _records()


def _records() -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.tsv"
        if library().nullgpu_dump(str(path).encode()):
            raise OSError(f"the records could not be written to {path}")
        rows = (line.split("\t") for line in path.read_text().splitlines())
        return [Record(float(seconds), what, name, info) for seconds, what, name, info in rows]
