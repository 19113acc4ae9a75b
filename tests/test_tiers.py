"""The tables of ``tests/tiers.py`` name tests that exist."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import tiers

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


BUSY = "import time\nwhile time.process_time() < 0.3: pass"
COUNTED = f"""
import subprocess, sys, time
from tests.cpu_time import of_this_process_and_its_children
subprocess.run([sys.executable, "-c", {BUSY!r}], check=True)
print(of_this_process_and_its_children() - time.process_time())
"""


def test_the_time_of_started_processes_is_counted():
    result = subprocess.run([sys.executable, "-c", COUNTED], cwd=tiers.ROOT.parent, capture_output=True, check=True)
    assert float(result.stdout) > 0.3
