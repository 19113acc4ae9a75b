"""What the GPU did in a profiled step: time and number of kernels by category, from a trace of torch's profiler.

A kernel's category follows from its name, and from the operations during which the host launched it, where the trace
has them (``aten::_scaled_mm``, ``Optimizer.step``). Names of cuBLAS's kernels for Hopper (``nvjet_``) say the types of
their operands: ``tst`` and ``hsh`` are bf16 and fp16, the longer words are FP8.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_lane import measure

Event = Mapping[str, Any]
CATEGORIES = ("gemm bf16", "gemm fp8", "attention", "elementwise", "optimizer", "copies")
"""``gemm bf16`` has all products that are not FP8; ``elementwise`` all other kernels: casts, norms, reductions."""
KERNELS, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
OPERATIONS = ("cpu_op", "user_annotation")
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)
NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
FP8_WORD = re.compile(r"e4m3|e5m2|fp8|float8", re.IGNORECASE)
OPTIMIZER = re.compile(r"multi_tensor_apply|adam", re.IGNORECASE)
NAMED, NAME_LENGTH = 12, 100
"""So many kernels are listed by name, and so much of a name."""


def profiled(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run and profile a warm training step: the figures of ``summary``, or the reason why there are none.

    Nothing is run on a device that is no GPU, because there are no kernels.
    """
    if device.type != "cuda":
        return {}
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            return summary(json.loads(path.read_text(errors="replace")), 1)
    except (RuntimeError, OSError, ValueError, KeyError) as error:  # the step's own figures are there already
        return {"failed": measure.describe(error)}


def category(event: Event, operations: Iterable[str] = ()) -> str:
    """The category of one kernel or copy; ``operations`` of the host were running when it was launched."""
    name, running = str(event["name"]), tuple(operations)
    if any(operation.startswith("Optimizer.step") for operation in running) or OPTIMIZER.search(name):
        return "optimizer"
    if event["cat"] in COPIES:
        return "copies"
    if ATTENTION.search(name):
        return "attention"
    if name.startswith("triton_") or not GEMM.search(name):
        return "elementwise"
    return "gemm fp8" if _is_fp8(name) or "aten::_scaled_mm" in running else "gemm bf16"


def _is_fp8(name: str) -> bool:
    word = NVJET.search(name)
    return bool(FP8_WORD.search(name)) or (word is not None and len(word[1]) > 3)


def summary(trace: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Per step: kernels, milliseconds and numbers by category, milliseconds in which the GPU worked, and the longest.

    Raises:
        ValueError: the trace has no kernel, because the profiler does not see this device.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ran = [e for e in events if e.get("cat") in (KERNELS, *COPIES)]
    if not ran:
        raise ValueError("the profiler saw no kernel of this device")
    launched_in = _operations_of_launches(events)
    ms: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    counts: Counter[str] = Counter()
    longest: dict[str, list[float]] = defaultdict(list)
    for event in ran:
        kind = category(event, launched_in.get(event.get("args", {}).get("correlation"), ()))
        ms[kind] += event["dur"] / 1e3 / steps
        counts[kind] += 1
        longest[str(event["name"])[:NAME_LENGTH]].append(event["dur"] / 1e3)
    top = sorted(longest.items(), key=lambda item: -sum(item[1]))[:NAMED]
    return {
        "profiled_steps": steps,
        "kernels": sum(e["cat"] == KERNELS for e in ran) / steps,
        "gpu_ms": ms,
        "gpu_counts": {kind: counts[kind] / steps for kind in CATEGORIES},
        "busy_ms": _busy(ran) / 1e3 / steps,
        "longest": {name: {"ms": sum(found) / steps, "count": len(found) / steps} for name, found in top},
    }


def _busy(events: list[Event]) -> float:
    """Microseconds in which at least one of the events ran; streams overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _operations_of_launches(events: list[Event]) -> dict[Any, tuple[str, ...]]:
    """By correlation: the names of the operations that were running on the thread that launched."""
    threads: dict[Any, list[tuple[float, int, Event]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in OPERATIONS:
            threads[event.get("tid")].append((event["ts"], 0, event))
        elif event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            threads[event.get("tid")].append((event["ts"], 1, event))
    found: dict[Any, tuple[str, ...]] = {}
    for marks in threads.values():
        open_ones: list[Event] = []
        for at, is_launch, event in sorted(marks, key=lambda mark: (mark[0], mark[1], -mark[2].get("dur", 0.0))):
            open_ones = [one for one in open_ones if one["ts"] + one["dur"] >= at]
            if is_launch:
                found[event["args"]["correlation"]] = tuple(str(one["name"]) for one in open_ones)
            else:
                open_ones.append(event)
    return found
