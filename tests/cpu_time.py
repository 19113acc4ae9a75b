"""The closing line of a run: how long it took on the wall and on all processors.

Each worker counts itself and the processes that it started. A process counts when it has ended and was waited for, so
the servers that stay alive are ended first. Not counted are processes that were killed together with their parents.
"""

import resource
import sys
import time

import pytest

from tests.fsdp2.ranks import stop_server

START = time.monotonic()


def of_this_process_and_its_children() -> float:
    """Return seconds of user and system time."""
    stop_server()
    if "torch._inductor.async_compile" in sys.modules:
        sys.modules["torch._inductor.async_compile"].shutdown_compile_workers()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class ClosingLine:
    """A plugin of pytest for the process of the user and for each worker of pytest-xdist."""

    def __init__(self) -> None:
        self.seconds_of_workers: list[float] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = of_this_process_and_its_children()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        self.seconds_of_workers.append(getattr(node, "workeroutput", {}).get("cpu", 0.0))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        # the workers are children of this process, and have counted themselves
        mine = time.process_time() if self.seconds_of_workers else of_this_process_and_its_children()
        cpu = mine + sum(self.seconds_of_workers)
        terminalreporter.write_line(
            f"{(time.monotonic() - START) / 60:.1f} minutes on the wall, {cpu / 60:.1f} CPU-minutes"
        )
