"""One thing to measure, and what a part of the lane is."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.gpu_lane.settings import Settings

PROTOCOL_FD = "GPU_LANE_FD"
"""Environment variable of a worker process: where its results go."""


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
    fd = os.environ.get(PROTOCOL_FD)
    if fd is not None:
        send(int(fd), {"stage": name, "figures": figures})


def send(fd: int, message: dict[str, Any]) -> None:
    """One line of JSON to the process that started this worker."""
    os.write(fd, (json.dumps(message, default=str) + "\n").encode())
