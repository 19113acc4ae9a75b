"""``tests``: runs tests/gpu and keeps the verdict of every test, also of those before a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_lane.item import TIMEOUT, Item
from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.results import CUT_SHORT
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import time_limit

FOLDER = "tests/gpu"
LINE = re.compile(r"^(tests/\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.+?)?) - (.*)$", re.MULTILINE)
FIRST = ("numerics", "alignment", "te", "te_fp8_params", "training", "compile", "fsdp2")
"""Files in order of value; all others follow."""
LIMIT, ONE_TEST = 420.0, 100.0
"""Seconds for a file, and for one test where pytest-timeout is there."""
SPARE = 20.0
"""Seconds to stop a hanging test and still report the others."""


class Tests:
    """The part: one item per file, so that one that hangs costs itself only."""

    name = "tests"

    def items(self, settings: Settings) -> list[Item]:
        files = sorted((ROOT / FOLDER).glob("test_*.py"), key=_value)
        if settings.smoke:
            files = files[:1]
        return [Item(key=f"{FOLDER}/{path.name}", seconds=20.0, limit=LIMIT) for path in files]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        limit = time_limit(LIMIT)
        return run_pytest(key, min(limit, float(os.environ.get(TIMEOUT, limit))) - SPARE)


def _value(path: Path) -> tuple[int, str]:
    name = path.stem.removeprefix("test_")
    return FIRST.index(name) if name in FIRST else len(FIRST), name


def run_pytest(target: str, limit: float) -> dict[str, Any]:
    """Outcomes by test, the tail of the output, the exit status (None: stopped at the limit)."""
    # -W: importing that machine's libraries may warn, and our own configuration makes warnings errors
    options = ["-vv", "-W", "default", "-p", "no:cacheprovider", "--color=no", "--tb=short", "--show-capture=no"]
    options += ["-o", f"timeout={time_limit(ONE_TEST):.0f}"]
    command = [sys.executable, "-m", "pytest", target, *options]
    with tempfile.TemporaryDirectory() as folder:
        log, verdicts = Path(folder) / "log", Path(folder) / "verdicts.xml"
        command.append(f"--junitxml={verdicts}")
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "300"},
                preexec_fn=_interruptible,
            )  # fmt: skip
            status = _wait(process, limit)
        text = log.read_text(errors="replace")
        measured = properties(verdicts.read_text()) if verdicts.exists() else {}
    return parse(text, status) | {"measured": measured}


def _interruptible() -> None:
    """What is started in the background ignores interrupts, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit status; None: stopped at the limit, by an interrupt first, so that pytest still says what it found."""
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=SPARE - 2)
    except subprocess.TimeoutExpired:  # it hangs in a kernel
        process.kill()
        process.wait()
    return None


def properties(xml: str) -> dict[str, dict[str, str]]:
    """What tests measured (``record_property``): SQNR, bytes, losses, by test."""
    found = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        values = {row.get("name", ""): row.get("value", "") for row in case.iter("property")}
        if values:
            found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = values
    return found


def parse(text: str, status: int | None) -> dict[str, Any]:
    """The verdicts in pytest's verbose output."""
    outcomes = {name: outcome.lower() for name, outcome in LINE.findall(text)}
    reasons = {name: reason[:400] for name, reason in SUMMARY.findall(text)}
    counts = Counter(outcomes.values())
    headline = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"
    if status is None:
        headline += ", stopped at the time limit"
    return {
        "exit_status": status, CUT_SHORT: status is None, "counts": dict(counts), "outcomes": outcomes,
        "reasons": reasons, "tail": text[-6000:] if status not in (0, 5) else "", "headline": headline,
    }  # fmt: skip
