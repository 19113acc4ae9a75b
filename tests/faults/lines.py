"""Writes down which lines of the package each test runs, in all processes that the test starts.

    python -m pytest -p tests.faults.lines -n 0 --tier 1

A line of JSON for each test that passes goes to ``.faults/ordinary/lines.jsonl``; the variable ``FAULTS_LANE`` gives
another folder. A test that stands there is left out, so a run that was stopped goes on where it stopped. Of a test with
many cases the first and the last run.
"""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANE = os.environ.get("FAULTS_LANE", "ordinary")
FILE = ROOT / ".faults" / LANE / "lines.jsonl"
RANKS = 15.0
"""CPU-seconds that a test by itself takes at least if it starts processes: they import torch."""


def sources(lane: str) -> Path:
    """Return the package as it was when its lines were written down."""
    return ROOT / ".faults" / lane / "lightning_lowprec"


def recorded(lane: str) -> dict[str, dict]:
    """Return what is written down of a lane, by the name of the test."""
    file = sources(lane).with_name(FILE.name)
    if not file.exists():
        return {}
    return {line["test"]: line for line in map(json.loads, file.read_text().splitlines())}


def cpu_seconds(process: int | None = None) -> float:
    """Return what a process (this one) and its descendants have used, dead or alive."""
    seconds, waiting = 0.0, [process or os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


class Recorder:
    """A plugin of pytest. The children of a test write files, which are read when the test has ended."""

    def __init__(self) -> None:
        import coverage

        self.folder = FILE.with_suffix(".data")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if not sources(LANE).exists():
            shutil.copytree(ROOT / "lightning_lowprec", sources(LANE))
        self.coverage = coverage.Coverage(data_file=str(self.folder / "lines"), data_suffix=True, config_file=False)
        self.coverage.config.config_file = ""  # there is none, and `patch` asks
        self.coverage.set_option("run:source", [str(ROOT / "lightning_lowprec")])
        self.coverage.set_option("run:parallel", True)
        self.coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "trace-changed"])
        self.coverage.set_option("run:patch", ["subprocess", "fork", "_exit"])
        self.coverage.start()
        self.own = self.coverage.get_data()
        self.unreadable = coverage.CoverageException

    def lines(self, test: str) -> tuple[dict[str, list[int]], bool]:
        """Return the lines that the test ran, by the file's path in the package, and whether it started processes."""
        self.coverage.get_data()  # takes what was seen until now
        self.own.set_query_context(test)
        parts = [self.own]
        own = Path(self.own.data_filename())
        for file in self.folder.glob("lines.*"):
            if file != own and not file.name.endswith("-journal"):
                data = type(self.own)(str(file))
                with suppress(self.unreadable):  # of a process that still writes, or was killed
                    data.read()
                    parts.append(data)
        lines: dict[str, set[int]] = defaultdict(set)
        for data in parts:
            for name in data.measured_files():
                lines[str(Path(name).relative_to(ROOT / "lightning_lowprec"))].update(data.lines(name) or ())
            if data is not self.own:
                data.close(force=True)
                Path(data.data_filename()).unlink(missing_ok=True)
        return {name: sorted(some) for name, some in sorted(lines.items()) if some}, len(parts) > 1

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = recorded(LANE)
        ends = [{item.nodeid.partition("[")[0]: item for item in some}.values() for some in (items, items[::-1])]
        chosen = {item for some in ends for item in some if item.nodeid not in known}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.failed = False
        self.coverage.switch_context(item.nodeid)
        started = cpu_seconds()
        result = yield
        seconds = cpu_seconds() - started
        lines, children = self.lines(item.nodeid)
        seconds = max(seconds, RANKS * children)
        self.coverage.switch_context("")
        if not self.failed:
            with FILE.open("a") as file:
                file.write(json.dumps({"test": item.nodeid, "seconds": round(seconds, 2), "lines": lines}) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed or report.skipped


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())
