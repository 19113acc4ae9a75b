"""Time four ways to train an 8B-shaped stack on one GPU, in ten minutes, beside what the ledger has predicted.

    python -m benchmarks.gpu                     # an H100 (8 layers) or an H200 (16 layers); writes gpu.json
    python -m benchmarks.gpu --layers 4          # a smaller GPU

Three numbers: the step of `fp8-hybrid` against Lightning's compiled `bf16-mixed` and torchao by hand, the step of
`bf16-8bit`, and the peak of memory. The losses stand beside them. Every contender trains the same model on the same
data, each in a new process. The command prints the table for the README, and writes every raw figure to one JSON file.

A prediction is the ledger's: FLOPs and bytes, counted on a machine without a GPU (`benchmarks/results`), over assumed
rates. The rates are those of an H200; on an H100 bytes take longer, by the data sheets. Steps of other sizes than 8 and
16 layers were not counted, and have no prediction.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks import machine
from benchmarks.ledger import report, roofline, score
from benchmarks.ledger.entry import Entry
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals import contenders, models
from benchmarks.rivals.running import Job
from benchmarks.rivals.values import use_what_the_device_has, values_exist

BY_HAND: Final = "torchao tensorwise, compiled"
EIGHT_BITS: Final = "ours bf16-8bit"
CONTENDERS: Final = (contenders.BASELINE, BY_HAND, contenders.MAIN, EIGHT_BITS)
"""The baseline comes first."""
COUNTED: Final = (
    "null-gpu-2026-11-29/ledger.json",
    "null-gpu-2026-11-29/ledger-h200.json",
    "null-gpu-2026-11-29/ledger-h100.json",
)
"""Steps of 16 layers, that of `bf16-8bit` in a file of its own, and of 8 layers."""
BANDWIDTH: Final = {"H100": 3.35 / 4.8}
"""The bandwidth of a GPU over that of an H200, by the data sheets."""
BATCH: Final = 2
WARM_STEPS: Final = 4
"""The first compiles, the second makes the optimizer's state, the others raise the clocks."""
NO_FIGURES: Final = "**This device computes nothing: no time, no loss and no ratio below means anything.**"
Run = dict[str, Any]


# ---- one contender, in a process of its own


def train(key: str, shape: models.Shape, steps: int) -> Run:
    """Train by one contender, and return the milliseconds of every timed step, the peak of memory and all losses."""
    device = torch.device("cuda", 0)
    use_what_the_device_has()
    if not values_exist():
        take_first_variant()  # every variant of a tuned kernel would be compiled, and none would be faster
    running = contenders.find(key).setup(Job(shape=shape, device=device))
    data = models.batches(shape, BATCH, device)
    start = time.perf_counter()
    losses = [running.step([data[0]])]
    torch.cuda.synchronize(device)
    first = time.perf_counter() - start
    losses += [running.step([data[index % len(data)]]) for index in range(1, WARM_STEPS)]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        losses.append(running.step([data[(WARM_STEPS + index) % len(data)]]))
        event.record()
    torch.cuda.synchronize(device)
    times = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return {
        "contender": key,
        "first_step_s": first,
        "step_ms": times,
        "ms": median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "losses": [loss.item() for loss in losses],
        **running.notes,
    }


def in_a_process(key: str, layers: int, steps: int) -> Run:
    """Return what :func:`train` finds in a child process, or the last line that a process that failed has written."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", key, "--layers", str(layers), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        run: Run = json.loads(lines[-1])
        return run
    said = done.stderr.strip().splitlines() or ["nothing was written"]
    return {"contender": key, "failed": f"status {done.returncode}: {said[-1][:300]}"}


# ---- predictions


def counted() -> Iterator[Entry]:
    """Yield what the ledger has counted."""
    for file in COUNTED:
        data = json.loads((Path(__file__).parent / "results" / file).read_text())
        yield from (Entry.from_json({**entry, "kernels": []}) for entry in data["entries"])


def rates_of(device: str) -> roofline.Rates:
    """Return the assumed rates of an H200, with the bandwidth of this GPU."""
    rates = roofline.assumed()
    slower = next((factor for name, factor in BANDWIDTH.items() if name in device), 1.0)
    return replace(rates, values={**rates.values, "bandwidth": slower * rates.values["bandwidth"]})


def predictions(shape: models.Shape, device: str) -> dict[str, Run]:
    """Return the predicted milliseconds and the counted peak, by contender; empty for sizes that nobody counted."""
    found = {}
    for entry in counted():
        if entry.contender in CONTENDERS and entry.shape == asdict(shape) and entry.batch == BATCH:
            ms = roofline.predict(entry, rates_of(device)).total
            found[entry.contender] = {"ms": ms, "peak_bytes": entry.peak}
    return found


# ---- the table


def table(runs: Sequence[Run], predicted: Mapping[str, Run]) -> str:
    """Return the README's table: each figure, and beside it the prediction."""
    measured = {run["contender"]: run for run in runs if "failed" not in run}
    rows = []
    for key, run in measured.items():
        beside = predicted.get(key, {})
        row = [key, _number(run["ms"]), _number(beside.get("ms"))]
        for figures in (measured, predicted):
            base, own = figures.get(contenders.BASELINE), figures.get(key)
            row.append("-" if base is None or own is None else f"{base['ms'] / own['ms']:.2f}")
        row += [_number(run["peak_bytes"], 1e9), _number(beside.get("peak_bytes"), 1e9), f"{run['losses'][-1]:.4f}"]
        rows.append(row)
    head = ["", "step, ms", "predicted", "times bf16-mixed", "predicted", "peak GB", "counted", "last loss"]
    failed = [f"\n{run['contender']} failed: {run['failed']}" for run in runs if "failed" in run]
    return report.table(head, rows) + "\n".join(failed)


def _number(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.1f}"


def document(shape: models.Shape, steps: int, runs: Sequence[Run]) -> Run:
    """Return what the JSON file holds."""
    device = torch.cuda.get_device_name(0)
    return {
        "device": device,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "computes": values_exist(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "versions": machine.versions(("torch", "torchao", "lightning", "triton")),
        "shape": asdict(shape),
        "sequences": BATCH,
        "steps": steps,
        "predicted": predictions(shape, device),
        "runs": list(runs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every contender ran, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="default: 16, or 8 where 16 do not fit")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of every contender")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("python -m benchmarks.gpu needs a CUDA GPU with FP8, such as an H100.", file=sys.stderr)
        return 2
    memory = torch.cuda.get_device_properties(0).total_memory
    shape, _ = models.fitting(models.SHAPES["8b"], memory, (BATCH,))
    shape = shape if chosen.layers is None else replace(shape, layers=chosen.layers)
    if chosen.one is not None:
        print(json.dumps(train(chosen.one, shape, chosen.steps)))
        return 0
    runs = []
    for key in CONTENDERS:
        print(f"{key} ...", file=sys.stderr, flush=True)
        runs.append(in_a_process(key, shape.layers, chosen.steps))
        found = document(shape, chosen.steps, runs)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['device']}, {shape.layers} layers, {BATCH} x {shape.sequence} tokens, torch {torch.__version__}:\n")
    print("" if found["computes"] else f"{NO_FIGURES}\n")
    print(table(runs, found["predicted"]))
    print(f"Predicted ratios miss published ratios of others by {score.missed():.1f} % in the mean (docs/speed.md).")
    return int(any("failed" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
