"""What one test leaves behind must not reach the next; which tests are in which tier; how long they took."""

import os
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests import tiers
from tests.cpu_time import ClosingLine
from tests.entry_points import read_once
from tests.garbage import leave_what_is_there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", type=int, choices=(1, 2), help="1: without tests marked slow; 2: only these")
    parser.addoption("--plugin", action="append", default=[], help="with --tier 1: the contract of this plugin too")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ClosingLine())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the files of the second tier for a run of the first, and the other way round."""
    other = {1: 2, 2: 1}.get(config.option.tier)
    return True if other is not None and tiers.all_tests_of(collection_path) == other else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tier:
        also = config.option.plugin
        mine = [item for item in items if tiers.of_test(item, also) == config.option.tier]
        whole = not any("::" in arg for arg in config.args) and not config.option.keyword
        if whole and (lost := tiers.cases_that_are_not_there(items)):
            raise pytest.UsageError(f"marks name cases that are not there: {sorted(lost)}")
        chosen = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = mine


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a failure down at once where ``FAILURES`` names a file: the output of a lane comes whole, when it ends."""
    file = os.environ.get("FAILURES")
    if file and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(f"FAILED {report.nodeid} ({report.when}): {said}\n")


def pytest_collection_finish() -> None:
    """Have entry points read once."""
    read_once()
    leave_what_is_there()


@pytest.fixture
def caught():
    """All warnings of a test, repeated ones too; none of them is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.fixture(autouse=True, scope="module")
def own_compiler():
    """Compiled code of other files counts towards the limits of the compiler: all layers share one forward."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def own_environment_of_the_file():
    """What fixtures of a whole file write into the environment ends with the file."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def own_environment():
    """Lightning writes LOCAL_RANK and the like into the environment; a script started later would wait for ranks."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
