"""The GPU lane: step time, products, losses and memory on a GPU with FP8, in one call of at most 25 minutes.

    make gpu-lane                                                          # everything, into gpu-lane-out/
    python -m benchmarks.gpu_lane --out OUT --minutes 9.5                  # the same in several calls: each goes on
    python -m benchmarks.gpu_lane --part linear --out OUT [--smoke] [--only KEY ...]
    python -m benchmarks.gpu_lane --merge DIR DIR ... [--out OUT]

Writes OUT/results.json after every item, then report.md, gains.json (the linear table for plans and ``min_gain``) and
pictures, and prints the table of the README and the paths of the pictures. A call with an OUT that has results already
goes on with what is not there yet. Without ``--out`` merged results go where they are committed:
``benchmarks/results``, named by device and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane.settings import Settings

COMMITTED = "benchmarks/results"
MINUTES = {"step8b": 9.0, "linear": 5.0, "loss": 7.5, "memory": 3.5}
"""The parts in order of value, and what each takes at most of a call of 25 minutes."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything that could be asked for was tried; 2 if the arguments or the output folder do not do."""
    started = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    if args.out is None and not args.merge:
        parser.error("a measurement needs --out")
    if args.merge:
        return _merge(args.merge, args.out)
    import torch

    from benchmarks.gpu_lane import machine, measure
    from benchmarks.gpu_lane.parts import PARTS
    from benchmarks.gpu_lane.results import Results
    from benchmarks.gpu_lane.runner import run_part
    from benchmarks.gpu_lane.values import time_limit, use_what_the_device_has, values_exist

    use_what_the_device_has()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = _settings(args, device.type)
    if device.type == "cpu":
        torch.set_num_threads(1)
        if not args.smoke:
            print("No CUDA device: only --smoke runs here.", file=sys.stderr)
            return 2
    try:
        facts = machine.facts(device)
    except Exception as error:
        facts = {"device": str(device), "failed": measure.describe(error)}
    run = {
        "date": args.date, "commit": machine.commit(), "smoke": args.smoke, "values": values_exist(),
        "parts": args.part, "argv": sys.argv[1:], "machine": facts,
    }  # fmt: skip
    try:
        results = Results(args.out, run)
    except ValueError as error:
        print(f"{args.out}: {error}", file=sys.stderr)
        return 2
    isolate = args.isolate or device.type != "cpu"
    end = started + time_limit(args.minutes * 60)
    for name in args.part:
        deadline = min(end, time.monotonic() + time_limit(MINUTES[name] * 60))
        run_part(PARTS[name], settings, results, isolate=isolate, deadline=deadline)
        write(results.data, args.out)
    print(closing(results.data, args.out))
    return 0


def closing(data: dict[str, Any], out: Path) -> str:
    """Return what a call ends with: the README's table of these results, and where report and pictures lie."""
    from benchmarks.readme_table import table_of_steps

    steps = table_of_steps(data) or "No training step was measured."
    return "\n\n".join([steps, "\n".join(map(str, [out / "report.md", *sorted(out.glob("*.png"))]))])


def write(data: dict[str, Any], folder: Path) -> None:
    """Everything that follows from the results."""
    from benchmarks.gpu_lane import figures, measure, plots, report

    text = report.render(data)
    try:
        gains = figures.gains(data)
        if gains:
            (folder / "gains.json").write_text(json.dumps(gains, indent=1))
    except Exception as error:
        text += f"\ngains.json: {measure.describe(error)}\n"
    for name, reason in plots.draw(data, folder).items():
        text += f"\nNo picture ({name}): {reason}\n"
    (folder / "report.md").write_text(text)


def _merge(folders: Sequence[Path], out: Path | None) -> int:
    from benchmarks.gpu_lane.machine import ROOT
    from benchmarks.gpu_lane.results import FILE, folder_name, merge

    try:
        data = merge([json.loads((folder / FILE).read_text()) for folder in folders])
        out = out or ROOT / COMMITTED / folder_name(data)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(json.dumps(data, indent=1))
    write(data, out)
    print(out)
    return 0


def _settings(args: argparse.Namespace, device: str) -> Settings:
    return Settings(
        device=device,
        smoke=args.smoke,
        compile=device != "cpu",
        steps=args.steps or (6 if args.smoke else 20),
        batch=args.batch,
        seeds=args.seeds,
        only=tuple(args.only),
        out=str(args.out.resolve()),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_lane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--part", nargs="+", choices=MINUTES, default=list(MINUTES), help="one or more, in this order")
    what.add_argument("--merge", nargs="+", type=Path, metavar="DIR", help="folders of earlier calls")
    parser.add_argument("--out", type=Path, help="where results go; continued if there are some")
    parser.add_argument("--smoke", action="store_true", help="toy sizes; the only way without a GPU")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for the whole call (25)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="items whose key contains one of these")
    parser.add_argument("--steps", type=int, help="training steps of step8b (20)")
    parser.add_argument("--batch", type=int, help="sequences per step (what fits)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each precision of loss (1)")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--isolate", action="store_true", help="worker processes on CPU too")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the run, if the clock is wrong")
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a broken CUDA context must not hang the exit
