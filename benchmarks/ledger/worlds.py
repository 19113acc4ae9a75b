"""Count what rank 0 of 8 to 512 GPUs sends and holds, at the shapes of Llama 3, on the null GPU. Nothing is timed.

python -m benchmarks.ledger.worlds [--shape 8b 70b 405b] [--world 8 64 512] [--precision NAME ...] --out FOLDER

Each case runs in a process of its own: real torch, Fabric, `FSDP2Strategy` and fused AdamW, on torch's fake process
group. Most cases have four layers, since every layer sends the same. Five precisions also run with all layers, for the
memory. Blocks are not compiled, which changes neither what is sent nor the state; activations are recomputed per block.
FOLDER gets worlds.json and worlds.md. The default table took 12 minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ledger.launch import environment
from benchmarks.ledger.recorder import on_null_gpu
from benchmarks.ledger.worlds_report import markdown

if TYPE_CHECKING:
    from benchmarks.ledger.world_case import Case

SHAPES = ("8b", "70b", "405b")
WORLDS = (8, 64, 512)
PRECISIONS = (
    "bf16-mixed",
    "bf16-true",
    "fp8-hybrid",
    "fp8-rowwise",
    "fp8-hybrid-te",
    "fp8-current-te",
    "bf16-master",
    "bf16-remainder",
    "bf16-sr",
    "msamp-o3",
)
WITH_COPIES = WITH_TENSOR_PARALLEL = ("bf16-mixed", "fp8-hybrid")
"""Precisions that also run with a copy per 8 ranks, and with tensor parallelism over 8 ranks."""
WITH_ALL_LAYERS = ("bf16-mixed", "bf16-true", "bf16-remainder", "fp8-hybrid", "fp8-hybrid-te")
ALL_LAYERS_ON = {"8b": (8,), "70b": (64,), "405b": (512,)}
"""The worlds on which all layers run."""
FEW = 4
"""Layers of the other cases."""
INSIDE = 8
"""Ranks of one copy, and of one tensor-parallel group: the GPUs of one machine."""
LIMIT_S = 300.0


def cases(
    shapes: Sequence[str], worlds: Sequence[int], precisions: Sequence[str], layers: int | None = None
) -> Iterator[Case]:
    """Yield the cases of a table: all shards, then copies, then tensor parallelism, then all layers."""
    from benchmarks.ledger.world_case import Case

    few = FEW if layers is None else layers
    for shape in shapes:
        for world in worlds:
            for precision in precisions:
                yield Case(shape=shape, world=world, precision=precision, layers=few)
        for world in (world for world in worlds if world > INSIDE and world % INSIDE == 0):
            for precision in (name for name in precisions if name in WITH_COPIES):
                yield Case(shape=shape, world=world, precision=precision, layers=few, copies=world // INSIDE)
            for precision in (name for name in precisions if name in WITH_TENSOR_PARALLEL):
                yield Case(shape=shape, world=world, precision=precision, layers=few, tensor=INSIDE)
        for world in (world for world in ALL_LAYERS_ON[shape] if world in worlds and layers is None):
            for precision in (name for name in precisions if name in WITH_ALL_LAYERS):
                yield Case(shape=shape, world=world, precision=precision)


def run_all(chosen: Iterable[Case], out: Path) -> list[dict[str, Any]]:
    """Run each case in a process of its own, print a line for each, and return their rows."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.ledger.world_case"])  # a process costs no imports of torch and Lightning
    rows = []
    for case in chosen:
        start = time.monotonic()
        result = out / "case.json"
        result.unlink(missing_ok=True)
        process = server.Process(target=_child, args=(case, result))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        row = json.loads(result.read_text()) if result.exists() else _lost(case, process.exitcode)
        rows.append(row)
        print(f"{time.monotonic() - start:5.1f} s  {case}: {row['outcome']} {row.get('note', '')[:120]}", flush=True)
    (out / "case.json").unlink(missing_ok=True)
    return rows


def _child(case: Case, result: Path) -> None:
    from benchmarks.ledger.world_case import run

    log = result.with_suffix(".log").open("w")  # warnings and tracebacks of the case that ran last
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    row = run(case)
    result.write_text(json.dumps(row))
    os._exit(0)  # torch's threads need no goodbye


def _lost(case: Case, code: int | None) -> dict[str, Any]:
    why = f"no result within {LIMIT_S:.0f} s" if code is None or code < 0 else "an error, see case.log"
    return {**asdict(case), "layers": case.size.layers, "outcome": "failed", "note": why}


def main(arguments: list[str]) -> int:
    """Run a table on the null GPU; the exit code says whether a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ledger.worlds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--world", nargs="+", type=int, default=WORLDS, help="numbers of GPUs, at most 1024")
    parser.add_argument("--precision", nargs="+", default=PRECISIONS)
    parser.add_argument("--layers", type=int, help="0: all; left out: few, and all in some cases")
    parser.add_argument("--device", default="h200", help="the GPU to play; its memory is the limit")
    parser.add_argument("--out", type=Path, required=True, help="a folder for worlds.json and worlds.md")
    chosen = parser.parse_args(arguments)
    if not on_null_gpu():
        command = [sys.executable, "-m", "benchmarks.ledger.worlds", *arguments]
        os.execvpe(command[0], command, environment(chosen.device))
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = run_all(cases(chosen.shape, chosen.world, chosen.precision, chosen.layers), chosen.out)
    page = {
        "device": f"null GPU ({chosen.device.upper()}), counted",
        "versions": {name: version(name) for name in ("torch", "lightning", "torchao", "transformer-engine")},
        "rows": rows,
    }
    (chosen.out / "worlds.json").write_text(json.dumps(page, indent=1) + "\n")
    (chosen.out / "worlds.md").write_text(markdown(page))
    return any(row["outcome"] == "failed" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
