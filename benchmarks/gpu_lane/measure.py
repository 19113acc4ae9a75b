"""How time and memory are measured: CUDA events around warmed runs, medians, contenders in turn.

On CPU the same functions read the host clock, so that every benchmark runs there too; the figures mean nothing.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

HIDE_LAUNCHES_MS = 2.0
"""The GPU sleeps at least this long before a timed run, so that the host has launched everything when the run starts.

Without it, small layers measure the launching host. In a training step the host is ahead of the GPU.
"""
HEADROOM = 1.5
"""The GPU sleeps this many times what the host took to launch a warm run, if that is longer: hundreds of kernels."""
LONGEST_SLEEP_MS = 100.0
"""The queue of launches holds about a thousand: however long the GPU sleeps, the rest are launched while it runs."""
CLOCK_HZ = 1.98e9  # of Hopper's multiprocessors: turns milliseconds into cycles of `torch.cuda._sleep`; a rough figure


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Host time of one run to its end: for first calls, which compile."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def host_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that the host takes to launch one run while the device waits for it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    launched = (time.perf_counter() - start) * 1e3
    synchronize(device)
    return launched


def sleep_ms(host: float) -> float:
    """How long the GPU sleeps before a run that the host launches in ``host`` milliseconds."""
    return min(max(HIDE_LAUNCHES_MS, HEADROOM * host), LONGEST_SLEEP_MS)


def one(run: Callable[[], Any], device: torch.device, host: float = 0.0) -> float:
    """Milliseconds that the device takes for one run, which the host launches in ``host`` milliseconds when warm."""
    if device.type != "cuda":
        return seconds(run, device) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(sleep_ms(host) * 1e-3 * CLOCK_HZ))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop))


def in_turn(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, hosts: Mapping[str, float] | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Samples of several contenders, taken in turn so that drift hits all alike; and who failed, with the error.

    ``hosts`` has the milliseconds in which the host launches a warm run of each.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                samples[name].append(one(run, device, (hosts or {}).get(name, 0.0)))
            except Exception as error:
                failed[name] = describe(error)
                del samples[name]
    return samples, failed


def rounds_within(ms: float, budget_s: float, low: int, high: int) -> int:
    """How many rounds of ``ms`` fit into the budget, between ``low`` and ``high``."""
    return max(low, min(high, int(budget_s * 1e3 / max(ms, 1e-3))))


def summary(samples: list[float]) -> dict[str, Any]:
    """The median beside the spread and every sample."""
    return {
        "ms": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": [round(sample, 5) for sample in samples],
    }


def steps(step: Callable[[int], Any], count: int, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each of ``count`` steps that follow each other without waiting, and of all by the host clock."""
    synchronize(device)
    start = time.perf_counter()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for index in range(count):
            step(index)
            marks[index + 1].record()
        torch.cuda.synchronize(device)
        times = [float(a.elapsed_time(b)) for a, b in pairwise(marks)]
    else:
        times = [seconds(lambda index=index: step(index), device) * 1e3 for index in range(count)]
    return times, (time.perf_counter() - start) * 1e3


def allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak(device: torch.device) -> dict[str, int]:
    """Most bytes since ``forget``, of tensors and of what torch took from the device."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def forget(device: torch.device) -> None:
    """Free what nobody holds on the GPU, and earlier peaks."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def start_afresh(device: torch.device) -> None:
    """Drop what earlier contenders of this process left, and what they hold of the device's memory.

    torch.compile's code, so that the next shape is compiled as static again; Transformer Engine's list of layers with
    delayed scales: every step under its autocast renews the scales of all of them.
    """
    torch._dynamo.reset()
    quantization: Any = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    forget(device)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
