"""The tables of ``tests/tiers.py`` name tests that exist."""

import ast
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests import cpu_time, tiers

ENTRIES = [
    (file, name.partition("[")[0]) for table in (tiers.TESTS, tiers.CASES) for file in table for name in table[file]
]


@cache
def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("pattern", tiers.FILES)
def test_a_pattern_has_files(pattern):
    assert list(tiers.ROOT.glob(pattern))


@pytest.mark.parametrize(("file", "name"), ENTRIES)
def test_an_entry_has_a_test(file, name):
    assert name in functions_of(tiers.ROOT / file)
    assert tiers.of_file(tiers.ROOT / file) == 1, "all of the file is in the second tier"


@pytest.mark.parametrize("file", [*tiers.TESTS, *tiers.CASES, "contract/test_contract_step.py"])
def test_a_run_of_either_tier_looks_into_a_file_with_tests_of_both(file):
    assert tiers.all_tests_of(tiers.ROOT / file) is None


def test_a_run_of_one_tier_leaves_out_the_files_of_the_other_but_no_folder():
    assert tiers.all_tests_of(tiers.ROOT / "test_notebook.py") == 2
    assert tiers.all_tests_of(tiers.ROOT / "test_tiers.py") == 1
    assert tiers.all_tests_of(tiers.ROOT / "contract") is None
    assert tiers.all_tests_of(tiers.ROOT / "contract" / "conftest.py") is None


BUSY = "import time\nwhile time.process_time() < 0.35: pass"


def test_the_time_of_started_processes_is_counted(monkeypatch):
    """The servers of this run stay alive."""
    monkeypatch.setattr(cpu_time, "stop_server", lambda: None)
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    before, mine = cpu_time.of_this_process_and_its_children(), time.process_time()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    counted = cpu_time.of_this_process_and_its_children() - before
    assert counted - (time.process_time() - mine) > 0.3  # rusage is counted in ticks
