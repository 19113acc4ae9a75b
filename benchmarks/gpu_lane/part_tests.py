"""``tests``: runs tests/gpu and keeps the verdict of every test, also of those before a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane.item import TIMEOUT, Item
from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.settings import Settings

FOLDER = "tests/gpu"
LINE = re.compile(r"^(tests/\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.+?)?) - (.*)$", re.MULTILINE)
LIMIT = 300.0
SPARE = 8.0
"""Seconds to stop a hanging test and still report the others."""


class Tests:
    """The part: one item per file, so that one that hangs costs itself only."""

    name = "tests"

    def items(self, settings: Settings) -> list[Item]:
        files = sorted((ROOT / FOLDER).glob("test_*.py"))
        if settings.smoke:
            files = files[:1]
        return [Item(key=f"{FOLDER}/{path.name}", seconds=20.0, limit=LIMIT) for path in files]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        return run_pytest(key, min(LIMIT, float(os.environ.get(TIMEOUT, LIMIT))) - SPARE)


def run_pytest(target: str, limit: float) -> dict[str, Any]:
    """Outcomes by test, the tail of the output, the exit status (None: stopped at the limit)."""
    # -W: importing that machine's libraries may warn, and our own configuration makes warnings errors
    options = ["-vv", "-W", "default", "-p", "no:cacheprovider", "--color=no", "--tb=short", "--show-capture=no"]
    command = [sys.executable, "-m", "pytest", target, *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            try:
                status: int | None = subprocess.run(
                    command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=limit, check=False,
                    env={**os.environ, "COLUMNS": "300"},
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = None
        text = log.read_text(errors="replace")
    return parse(text, status)


def parse(text: str, status: int | None) -> dict[str, Any]:
    """The verdicts in pytest's verbose output."""
    outcomes = {name: outcome.lower() for name, outcome in LINE.findall(text)}
    reasons = {name: reason[:400] for name, reason in SUMMARY.findall(text)}
    counts = Counter(outcomes.values())
    headline = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"
    if status is None:
        headline += ", stopped at the time limit"
    return {
        "exit_status": status, "counts": dict(counts), "outcomes": outcomes, "reasons": reasons,
        "tail": text[-6000:] if status not in (0, 5) else "", "headline": headline,
    }  # fmt: skip
