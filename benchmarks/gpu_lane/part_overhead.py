"""``overhead``: host time per step that our plugin adds to the same torchao code by hand, in Fabric and Trainer.

``fabric, fsdp2`` is our strategy beside torchao and ``fully_shard`` by hand. The model is so small that the host is
what takes the time; ours and by hand alternate in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from benchmarks import hook_overhead
from benchmarks.gpu_lane import measure, sharded_loop
from benchmarks.gpu_lane.item import Item, missing_library, stage
from benchmarks.gpu_lane.settings import Settings

FABRIC, TRAINER, SHARDED = "fabric", "trainer", "fabric, fsdp2"
DEEP = "fabric, four times as many layers"
"""What grows with the layers shows beside ``fabric``."""
PROFILED = ", profiled"
WIDTH, DEPTH, TOKENS = 256, 8, 64
PROFILED_STEPS, PROFILED_SMOKE, WARM_BATCHES = 20, 3, 3
STEP = "one training step"
HOST = [torch.profiler.ProfilerActivity.CPU]
FITS = 3
"""Fits of each kind, in turn: the Trainer cannot alternate within one."""
Loops = dict[bool, Callable[[], None]]
"""One step, by hand (True) and ours."""


class Overhead:
    """The part."""

    name = "overhead"

    def items(self, settings: Settings) -> list[Item]:
        missing = missing_library(("torchao.float8",))
        keys = (FABRIC, TRAINER, FABRIC + PROFILED, TRAINER + PROFILED, DEEP, SHARDED, SHARDED + PROFILED)
        return [Item(key=key, seconds=5.0, limit=150.0, missing=missing) for key in keys]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        before = hook_overhead.WIDTH, hook_overhead.DEPTH, hook_overhead.TOKENS
        if not settings.smoke:
            hook_overhead.WIDTH, hook_overhead.DEPTH, hook_overhead.TOKENS = WIDTH, DEPTH, TOKENS
        if key == DEEP:
            hook_overhead.DEPTH *= 4
        try:
            return {"layers": hook_overhead.DEPTH, **_measure(key, settings)}
        finally:
            hook_overhead.WIDTH, hook_overhead.DEPTH, hook_overhead.TOKENS = before


def _measure(key: str, settings: Settings) -> dict[str, Any]:
    steps = 5 if settings.smoke else 200
    if key == TRAINER:
        return trainer(steps)
    if key == TRAINER + PROFILED:
        return profiled_trainer(PROFILED_SMOKE if settings.smoke else PROFILED_STEPS)
    loops = _loops("fsdp2" if key.startswith(SHARDED) else "auto")
    return profiled(loops, settings) if key.endswith(PROFILED) else fabric(loops, steps, settings)


def fabric(loops: Loops, steps: int, settings: Settings) -> dict[str, Any]:
    """Time until a step is launched, and until it is done."""
    launched: dict[bool, list[float]] = {True: [], False: []}
    done: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(steps):
        for by_hand, loop in loops.items():
            measure.synchronize(settings.torch_device)
            start = time.perf_counter()
            loop()
            launched[by_hand].append((time.perf_counter() - start) * 1e3)
            measure.synchronize(settings.torch_device)
            done[by_hand].append((time.perf_counter() - start) * 1e3)
    return _difference(launched) | {"until_done": _difference(done)}


def trainer(steps: int) -> dict[str, Any]:
    """Time from the start of a batch to its end, the device waited for, over several fits."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for fit in range(FITS):
        for by_hand in (True, False) if fit % 2 == 0 else (False, True):
            stage(f"fit {fit}, {'by hand' if by_hand else 'ours'}")
            times[by_hand] += [t * 1e3 for t in hook_overhead.trainer_run(by_hand, "auto", steps).times]
    return _difference(times)


def profiled(loops: Loops, settings: Settings) -> dict[str, Any]:
    """The same by torch's profiler: its own cost is in both, so only the difference counts."""
    steps = PROFILED_SMOKE if settings.smoke else PROFILED_STEPS
    profiles = {}
    for by_hand, loop in [*loops.items()] * 2:  # the first ones warm the profiler itself
        with torch.profiler.profile(activities=HOST) as profile:
            for _ in range(steps):
                with torch.profiler.record_function(STEP):
                    loop()
        profiles[by_hand] = profile
    return _profiles(profiles, steps)


class Profiler(L.Callback):
    """Profiles some steps in the middle of a fit."""

    def __init__(self, steps: int) -> None:
        self.last = WARM_BATCHES + steps - 1
        self.profile = torch.profiler.profile(activities=HOST)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == WARM_BATCHES:
            self.profile.start()
        if WARM_BATCHES <= batch_idx <= self.last:
            self._step = torch.profiler.record_function(STEP)
            self._step.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if WARM_BATCHES <= args[2] <= self.last:
            self._step.__exit__(None, None, None)
        if args[2] == self.last:
            self.profile.stop()


def profiled_trainer(steps: int) -> dict[str, Any]:
    """The Trainer's steps by torch's profiler; the first fit of each kind warms the profiler itself."""
    profiles = {}
    for by_hand in (True, False, True, False):
        stage(f"fit, {'by hand' if by_hand else 'ours'}")
        callback = Profiler(steps)
        hook_overhead.fit(by_hand, "auto", WARM_BATCHES + steps, callback)
        profiles[by_hand] = callback.profile
    return _profiles(profiles, steps)


def _profiles(profiles: dict[bool, Any], steps: int) -> dict[str, Any]:
    """Per step: the host's time from the first call to the last, that in torch's operations, and their number."""
    found: dict[str, Any] = {}
    for by_hand, profile in profiles.items():
        rows = [row for row in profile.key_averages() if row.device_type == torch.autograd.DeviceType.CPU]
        times = [event.cpu_time_total / 1e3 for event in profile.events() if event.name == STEP]
        found["by_hand" if by_hand else "ours"] = {
            "host_ms": statistics.median(times),
            "operations": (sum(row.count for row in rows) - steps) / steps,
            "operations_ms": sum(row.self_cpu_time_total for row in rows if row.key != STEP) / steps / 1e3,
        }
    added = {field: found["ours"][field] - found["by_hand"][field] for field in found["ours"]}
    headline = f"{added['host_ms']:+.3f} ms of the host and {added['operations']:+.1f} operations per step"
    return {**found, "added": added, "headline": headline}


def _loops(strategy: str) -> Loops:
    """Ours, and by hand, warmed."""
    if strategy == "fsdp2":  # ours first: the other takes the process group that it finds
        loops = {False: sharded_loop.ours(), True: sharded_loop.by_hand()}
    else:
        loops = {by_hand: hook_overhead.fabric_step(by_hand, strategy) for by_hand in (True, False)}
    for loop in loops.values():
        for _ in range(3):
            loop()
    return loops


def _difference(times: dict[bool, list[float]]) -> dict[str, Any]:
    """ours - by hand, in milliseconds per step."""
    by_hand, ours = measure.summary(times[True]), measure.summary(times[False])
    added = statistics.median(times[False]) - statistics.median(times[True])
    headline = f"ours {ours['ms']:.3f} ms, by hand {by_hand['ms']:.3f} ms: {added:+.3f} ms per step"
    return {"ours": ours, "by_hand": by_hand, "added_ms": added, "headline": headline}
