"""Marks say which tier a test is in, and name cases that exist."""

import re
import subprocess
import sys

from tests import tiers

MARKED = """
import pytest
@pytest.mark.slow("b")
@pytest.mark.parametrize("case", "abc")
def test_some(case): pass
@pytest.mark.slow_but("a")
@pytest.mark.parametrize("case", "abc")
def test_most(case): pass
@pytest.mark.slow
def test_all(): pass
def test_none(): pass
"""


def collected(tmp_path, text, *options):
    (tmp_path / "test_marked.py").write_text(text)
    call = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-p", "tests.conftest", *options]
    call += ["-c", str(tiers.ROOT.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(call, cwd=tiers.ROOT.parent, capture_output=True, text=True)
    return done.stdout + done.stderr


def names(said):
    return sorted(re.findall(r"::(test_\w+(?:\[\w+\])?)", said))


def test_marks_say_the_tier(tmp_path):
    second = ["test_all", "test_most[b]", "test_most[c]", "test_some[b]"]
    first = ["test_most[a]", "test_none", "test_some[a]", "test_some[c]"]
    assert names(collected(tmp_path, MARKED, "--tier", "1")) == first
    assert names(collected(tmp_path, MARKED, "--tier", "2")) == second
    assert names(collected(tmp_path, MARKED)) == sorted(first + second)


def test_a_mark_that_names_no_case_is_an_error(tmp_path):
    said = collected(tmp_path, MARKED.replace('slow_but("a")', 'slow_but("x")'), "--tier", "1")
    assert "marks name cases that are not there" in said
    assert "test_most[x]" in said


def test_a_run_of_one_tier_leaves_out_the_files_of_the_other_but_no_folder():
    assert tiers.all_tests_of(tiers.ROOT / "test_notebook.py") == 2
    assert tiers.all_tests_of(tiers.ROOT / "test_layering.py") == 1
    assert tiers.all_tests_of(tiers.ROOT / "test_examples.py") is None, "it has tests of both"
    assert tiers.all_tests_of(tiers.ROOT / "contract") is None
    assert tiers.all_tests_of(tiers.ROOT / "contract" / "conftest.py") is None
