"""Train the precisions one after the other, each in a fresh process, and write the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_lowprec.extras import require
from lightning_lowprec.tools.compare.recorder import receive
from lightning_lowprec.tools.compare.report import write_report
from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec

WORKER = "lightning_lowprec.tools.compare.worker"
ERROR_LINES = 12
DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",  # spinning threads make a step 10 times slower when another process computes
}
"""Defaults for the training processes; the user's own environment wins."""


def compare(spec: CompareSpec) -> Comparison:
    """Train every precision of ``spec``, and write ``report.md``, ``loss.png``, ``results.json`` and the logs.

    A precision that fails does not stop the others: its result says why, and ``Comparison.ok`` is False. The errors
    below are raised before anything trains.

    Raises:
        ValueError: a precision is unknown.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from lightning_lowprec.registration import validate_name

    for name in spec.precisions:
        validate_name(name)
    require("matplotlib", "`lowprec compare`")
    spec.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(spec=spec, results=[run_one(spec, name) for name in spec.precisions])
    comparison.write_json(spec.out / "results.json")
    write_report(comparison)
    return comparison


def run_one(spec: CompareSpec, name: str) -> PrecisionResult:
    """Train one precision in a fresh process, whose stderr goes to ``<out>/<name>.log``."""
    log = spec.out / f"{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        spec_file, figures_file = Path(folder, "spec.json"), Path(folder, "figures.json")
        spec_file.write_text(json.dumps(spec.as_dict()), encoding="utf-8")
        command = [sys.executable, "-m", WORKER, str(spec_file), name, str(figures_file)]
        status = _run(command, log, name, spec.max_steps)
        figures = json.loads(figures_file.read_text(encoding="utf-8")) if figures_file.is_file() else {}
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    notes = [line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")]
    error = _error(status, lines) if status else None
    if error:
        tqdm.write(f"{name} failed, its log is {log}:\n{error}", file=sys.stderr)
    return PrecisionResult(name=name, notes=notes, error=error, **figures)


def _run(command: list[str], log: Path, name: str, max_steps: int) -> int:
    interval = 0.1 if sys.stderr.isatty() else 10.0  # seconds; few lines in a log file
    with (
        log.open("w", encoding="utf-8") as stderr,
        tqdm(total=max_steps, desc=name, unit="step", dynamic_ncols=True, mininterval=interval) as bar,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=DEFAULTS | os.environ | {"PYTHONIOENCODING": "utf-8"},
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _show(line, bar)
        except BaseException:
            process.kill()
            raise
        return process.wait()


def _show(line: str, bar: tqdm[Any]) -> None:
    text, message = receive(line)
    if text:
        bar.write(text.rstrip("\n"), file=sys.stdout)
    if message is None:
        return
    if "step" in message:
        bar.set_postfix(loss=f"{message['loss']:.3f}", refresh=False)
        bar.update(message["step"] - bar.n)
    else:
        bar.set_postfix(val=f"{message['val']:.4f}")


def _error(status: int, lines: list[str]) -> str:
    tail = "\n".join(deque((line for line in lines if line.strip()), ERROR_LINES))
    if status < 0:
        return f"{tail}\nthe process was killed by signal {-status} (9 often means: out of memory)".strip()
    return tail or f"the process ended with status {status} and wrote nothing to stderr"
