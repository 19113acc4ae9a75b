"""One thing to measure, and what a part of the lane is."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.gpu_lane.results import clean
from benchmarks.gpu_lane.settings import Settings

PR_SET_PDEATHSIG = 1
_parents: list[Connection] = []
"""In a worker process: the pipe to its parent."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One entry of a part, run by itself, recorded by itself."""

    key: str
    seconds: float = 5.0
    """Not started with less time than this left."""
    limit: float = 180.0
    """Killed after this long."""
    fresh: bool = False
    """In a process of its own."""
    needs: tuple[str, ...] = ()
    """What it imports: known beforehand to a process that waits for its turn."""
    missing: str | None = None
    """Why it cannot run here: recorded as missing, not started."""


class Part(Protocol):
    """A file of this package: which items, in order of value, and how to measure one."""

    name: str

    def items(self, settings: Settings) -> list[Item]:
        """Everything to measure, the most valuable first, missing ones included."""
        ...

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        """Raw figures of one item, as plain values."""
        ...


def missing_library(needs: Iterable[str]) -> str | None:
    """Why one of these modules cannot be imported, or None; each is really imported."""
    for module in needs:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name is not None and error.name.partition(".")[0] == module.partition(".")[0]
            return f"{module} is not installed" if absent else f"{module} does not import: {error}"
        except Exception as error:  # a wheel for another torch raises whatever it likes
            return f"{module} does not import: {type(error).__name__}: {str(error)[:200]}"
    return None


def stage(name: str, **figures: Any) -> None:
    """Say how far an item is, with the figures so far: what is left of it if it is killed."""
    for pipe in _parents:
        pipe.send({"stage": name, "figures": clean(figures)})


def begin() -> Connection:
    """In a worker process: end with the parent, and return the pipe to it, through which stages go from now on."""
    _end_with_the_parent()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # what this process starts must not hold the pipe open
    _parents.append(Connection(fd))
    return _parents[0]


def _end_with_the_parent() -> None:
    """A parent that is killed at a time limit must not leave a process on the GPU beside the next call's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
