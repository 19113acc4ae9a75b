"""Find lock files of compilations that were killed: DeepSpeed waits for them for ever, without a word.

DeepSpeed compiles helpers when they are first used: ``deepspeed_shm_comm`` at start-up on a CPU, optimizers such as
``cpu_adam`` on any device. torch's builder creates a file ``lock``, holds it open, and removes it at the end. If the
process is killed, the file stays, and every later process waits for its removal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightning.fabric.utilities.rank_zero import rank_zero_warn

HELPERS: Final = ("deepspeed_shm_comm", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion", "async_io")
"""The folders of helpers that training compiles."""
OLD: Final = 600.0
"""Seconds after which a lock that no process of this machine holds is stale on any machine of a cluster."""


def check_locks() -> None:
    """Warn of a lock that no process of this machine holds; raise if it is older than :data:`OLD` as well.

    A younger lock may be of another machine that shares the folder.

    Raises:
        RuntimeError: the message names the file to delete.
    """
    for lock in locks():
        age = _age(lock)
        if age is None or is_held(lock):
            continue
        what = (
            f"{str(lock)!r} is the lock of a compilation, {age:.0f} seconds old, and no process of this machine holds"
            " it: DeepSpeed would wait for ever if the compilation was killed."
        )
        if age > OLD:
            raise RuntimeError(f"{what} Delete the file.")
        rank_zero_warn(f"{what} If nothing compiles on another machine with the same folder, delete the file.")


def locks() -> Iterator[Path]:
    """Yield the lock files of DeepSpeed's helpers in the folder where torch builds extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # looks for CUDA's compiler, and warns

    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    roots = [Path(chosen)] if chosen else list(Path(get_default_build_root()).glob("*"))
    for root in roots:
        for helper in HELPERS:
            if (root / helper / "lock").exists():
                yield root / helper / "lock"


def is_held(lock: Path) -> bool:
    """Return whether a process of this machine, of the same user, has the file open; False where there is no /proc."""
    target = str(lock.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == target:
                return True
        except OSError:  # the process has ended, or is another user's
            continue
    return False


def _age(lock: Path) -> float | None:
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:  # just released
        return None
