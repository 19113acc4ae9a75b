"""Runs tests on a copy of the repository, in forked processes that have imported torch and Lightning."""

import compileall
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.ledger.recorder import on_null_gpu
from tests.faults.lines import ROOT, cpu_seconds

COPIED = (
    "lightning_lowprec", "tests", "docs", "examples", "benchmarks", "tools", "pyproject.toml", "README.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml", "lightning_lowprec_autoload.py",
)  # fmt: skip
PRELOAD = (
    "lightning", "lightning.pytorch.cli", "torchao.float8", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "hypothesis", "transformers.pytorch_utils",
)  # fmt: skip
"""What takes seconds to import, and is not ours: this package is imported from the copy, with the fault in it."""
LONGER = 6.0
"""CPU-seconds in which more tests that fail are looked for, once one has failed."""
ASK_CUDA = ("torchao.float8", "torch._inductor.compile_fx")
"""Their imports ask CUDA for devices, which CUDA allows here or in the forked processes."""


def preload() -> None:
    """Import what the forked processes share.

    Raises:
        RuntimeError: this package was imported with it, without any fault.
    """
    for name in PRELOAD:
        if name in ASK_CUDA and on_null_gpu():
            continue
        with suppress(ImportError):  # not all environments have all of it
            import_module(name)
    if any(name.startswith("lightning_lowprec.") for name in sys.modules):
        raise RuntimeError("the package is imported before a fault is planted in it")


class Copy:
    """A copy of the repository that takes one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        with suppress(FileExistsError):  # the null GPU, which would be built anew
            (folder / ".nullgpu").symlink_to(ROOT / ".nullgpu")
        compileall.compile_dir(folder / "lightning_lowprec", quiet=2)
        self._time = int(time.time())

    @contextmanager
    def planted(self, file: str, source: str) -> Iterator[None]:
        """Let a file of the package have this source for a while; what Python has compiled of the file is not used."""
        path = self.folder / "lightning_lowprec" / file
        whole, times = path.read_text(), path.stat()
        self._time += 2
        try:
            path.write_text(source)
            os.utime(path, (self._time, self._time))
            yield
        finally:
            path.write_text(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@dataclass
class Outcome:
    """What became of some tests."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Of all processors."""
    error: str = ""
    """The end of the log, if pytest could not run to its end."""


class _Teller:
    """A plugin of pytest in the forked process: says how each test ends, and stops when enough is known."""

    def __init__(self, tell: Callable[[str, str], None], wanted: int, seconds: float) -> None:
        self.tell, self.wanted, self.end = tell, wanted, cpu_seconds() + seconds
        self.worst: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("started", nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("broken", report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worst.get(report.nodeid) != "failed":
            self.worst[report.nodeid] = report.outcome if not report.passed else self.worst.get(report.nodeid, "passed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self.tell(self.worst.get(item.nodeid, "skipped"), item.nodeid)
        failed = list(self.worst.values()).count("failed")
        if failed and self.worst.get(item.nodeid) == "failed":
            self.end = min(self.end, cpu_seconds() + LONGER)
        if failed >= self.wanted or cpu_seconds() > self.end:
            item.session.shouldstop = "enough is known"
        return result


def _child(copy: Copy, tests: Sequence[str], pipe: int, log: Path, wanted: int, seconds: float) -> None:
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(copy.folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "benchmarks", "tools")]:
        del sys.modules[name]
    sys.path[:] = [str(copy.folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(copy.folder), *rest]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def tell(what: str, test: str) -> None:
        os.write(pipe, (json.dumps([what, test]) + "\n").encode())

    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--durations=0"]
    options += ["--durations-min=9999", "--continue-on-collection-errors"]
    code = int(pytest.main([*options, *tests], plugins=[_Teller(tell, wanted, seconds)]))
    if code not in (0, 1, 2):  # all passed, some failed, enough is known
        tell("error", str(code))


def run(copy: Copy, tests: Sequence[str], wanted: int = 1, seconds: float = 180) -> Outcome:
    """Run tests one after another, until ``wanted`` of them, or one some time ago, have failed, or the time is over.

    A test that uses twice the time that is left has failed: it hangs.
    """
    outcome, started, log = Outcome(), "", copy.folder / "log"
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _child(copy, tests, writer, log, wanted, seconds)
        except BaseException:
            os.write(writer, b'["error", "no test ran"]\n')
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    text = b""
    while True:
        if select.select([reader], [], [], 1)[0]:
            data = os.read(reader, 65536)
            text += data
            if not data:
                break
        outcome.seconds = max(outcome.seconds, cpu_seconds(pid))
        if outcome.seconds > 2 * seconds:
            break
        *lines, text = text.split(b"\n")
        for what, test in map(json.loads, lines):
            if what == "started":
                started = test
            elif what == "broken":
                outcome.failed += [name for name in tests if name.startswith(test)]
            elif what == "error":
                outcome.error = test
            else:
                getattr(outcome, what).append(test)
                started = ""
    os.close(reader)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if outcome.error:
        outcome.error += f": {log.read_text()[-2000:]}"
    if started:  # it hangs, or has ended the process
        outcome.failed.append(started)
    return outcome
