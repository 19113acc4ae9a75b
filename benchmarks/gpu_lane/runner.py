"""Runs the items of a part in order, records each, and goes on when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import measure
from benchmarks.gpu_lane.item import Item, Part
from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.results import FAILED, MISSING, NOT_REACHED, OK, Results
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import left_as_found, time_limit

LOG_LINES = 30
"""How much of a failed process's output is kept."""


class Inline:
    """Runs items in this process: for toy sizes, where starting one costs more than the item."""

    def __init__(self, part: Part, settings: Settings) -> None:
        self.part, self.settings = part, settings

    def run(self, item: Item, timeout: float) -> dict[str, Any]:
        try:
            with left_as_found():
                return {"status": OK, "figures": self.part.run(item.key, self.settings)}
        except Exception as error:
            return {"status": FAILED, "reason": measure.describe(error)}

    def close(self) -> None:
        """Nothing is open."""


class Isolated:
    """Runs items in worker processes: a crash, a hang or a broken CUDA context costs one item.

    A worker serves item after item until one fails, or one item if that is ``fresh``.
    """

    def __init__(self, part: Part, settings: Settings) -> None:
        self.part, self.settings = part, settings
        self._current: Worker | None = None

    def run(self, item: Item, timeout: float) -> dict[str, Any]:
        if item.fresh or self._current is None:
            self.close()
            self._current = Worker(self.part.name, self.settings, item.needs)
        entry = self._current.run(item.key, timeout)
        if item.fresh or (entry["status"] != OK and not entry.pop("reusable", False)):
            self.close()
        return entry

    def close(self) -> None:
        """End the process that still runs."""
        if self._current is not None:
            self._current.close()
            self._current = None


class Worker:
    """One process of ``module``; what it prints goes to a file."""

    module = "benchmarks.gpu_lane.worker"

    def __init__(self, part: str, settings: Settings, needs: tuple[str, ...]) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        command = [sys.executable, "-m", self.module, str(fd)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, pass_fds=(fd,), cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        theirs.close()  # without our copy the pipe ends with the process
        with suppress(OSError):
            self._pipe.send((part, settings, needs))

    def run(self, key: str, timeout: float) -> dict[str, Any]:
        """The entry of one item: what the worker sends, or how far it came."""
        deadline = time.monotonic() + timeout
        reached: dict[str, Any] = {"stage": "start", "figures": {}}
        with suppress(OSError):
            self._pipe.send(key)
        while self._pipe.poll(max(deadline - time.monotonic(), 0.0)):
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                return self._lost(f"the process ended (exit status {self._ended()})", reached)
            if "status" in message:
                if message["status"] != OK:
                    message |= {"stage": reached["stage"], "figures": reached["figures"], "log": self._last_lines()}
                return message
            reached = {"stage": message["stage"], "figures": {**reached["figures"], **message["figures"]}}
        return self._lost(f"stopped after {timeout:.0f} s", reached)

    def _ended(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=10)
        return None

    def _lost(self, what: str, reached: dict[str, Any]) -> dict[str, Any]:
        reason = f"{what} in stage {reached['stage']!r}"
        return {"status": FAILED, "reason": reason, "figures": reached["figures"], "log": self._last_lines()}

    def _last_lines(self) -> list[str]:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return [line.rstrip()[:300] for line in lines[-LOG_LINES:]]

    def close(self) -> None:
        """End the process and everything it started."""
        self._pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        self._log.close()


def run_part(part: Part, settings: Settings, results: Results, *, isolate: bool, deadline: float) -> None:
    """Every item that ``results`` does not have yet, until ``deadline`` (of ``time.monotonic``).

    What failed in an earlier call comes last, and the batch of an earlier call stays.
    """
    start = time.monotonic()
    settings = replace(settings, batch=settings.batch or results.batch(part.name))
    try:
        items = [item for item in part.items(settings) if wanted(item, settings)]
    except Exception as error:  # the list itself: nothing of this part can run, the next part can
        results.record(part.name, "(the list of items)", {"status": FAILED, "reason": measure.describe(error)})
        return
    for item in items:
        if item.missing is not None:
            _say(part, item, {"status": MISSING, "reason": item.missing}, results)
    pending = [item for item in items if item.missing is None and not results.done(part.name, item.key)]
    pending.sort(key=lambda item: results.status(part.name, item.key) == FAILED)
    settings = _run(part, pending, settings, results, isolate, deadline)
    results.add_seconds(part.name, time.monotonic() - start, settings.recorded())


def _run(
    part: Part, pending: list[Item], settings: Settings, results: Results, isolate: bool, deadline: float
) -> Settings:
    """Run what is pending; returns the settings in the end: smaller ones if the first item did not fit the device."""
    execute = Isolated(part, settings) if isolate else Inline(part, settings)
    any_ok = results.batch(part.name) is not None
    try:
        for item in pending:
            entry = _attempt(item, execute, deadline)
            smaller = None if any_ok else _smaller(settings, entry)
            if smaller is not None:
                settings = smaller
                execute.close()
                execute = Isolated(part, settings) if isolate else Inline(part, settings)
                entry = _attempt(item, execute, deadline)
            any_ok = any_ok or entry["status"] == OK
            _say(part, item, entry, results)
    finally:
        execute.close()
    return settings


def _smaller(settings: Settings, entry: dict[str, Any]) -> Settings | None:
    """Half the batch, if that is what an item ran out of memory with; the same for all that come after it."""
    batch = entry.get("figures", {}).get("batch", 1)
    if entry["status"] == OK or "OutOfMemory" not in entry.get("reason", "") or batch < 2:
        return None
    return replace(settings, batch=batch // 2)


def _attempt(item: Item, execute: Inline | Isolated, deadline: float) -> dict[str, Any]:
    """The entry of one item, if there is time for it."""
    left = deadline - time.monotonic()
    if left < item.seconds:
        reason = f"{max(left, 0):.0f} s were left, it wants {item.seconds:.0f} s"
        return {"status": NOT_REACHED, "reason": reason}
    start = time.monotonic()
    entry = execute.run(item, min(time_limit(item.limit), left))
    return {**entry, "seconds": round(time.monotonic() - start, 1)}


def wanted(item: Item, settings: Settings) -> bool:
    """Whether ``--only`` names it."""
    return not settings.only or any(text in item.key for text in settings.only)


def _say(part: Part, item: Item, entry: dict[str, Any], results: Results) -> None:
    results.record(part.name, item.key, entry)
    text = entry.get("reason") or entry.get("figures", {}).get("headline", "")
    print(f"[{part.name}] {item.key}: {entry['status']} ({entry.get('seconds', 0)} s) {text}"[:400], flush=True)
