"""Every name of another stack on docs/migration.md has a source, and stands there where the stack is installed."""

import importlib.metadata
import sysconfig
from pathlib import Path

import pytest

from tests.migration import quoted
from tests.migration.quoted import SOURCES, absent, known, sections

SITE = Path(sysconfig.get_path("purelib"))
INSTALLED = [
    (stack, entry) for stack, entries in SOURCES.items() for entry in entries
    if "package" in entry and entry["package"] != "deepspeed"
]  # fmt: skip
"""tests/deepspeed looks up DeepSpeed's."""


@pytest.mark.parametrize("stack", SOURCES)
def test_every_quoted_name_has_a_source(stack: str):
    assert quoted.quoted(sections()[stack]) - known(stack) == set()


@pytest.mark.parametrize("stack", SOURCES)
def test_the_section_says_which_version_was_run_or_read(stack: str):
    first = sections()[stack].split("```")[0]
    assert "**Run**" in first
    for entry in SOURCES[stack]:
        if "commit" in entry:
            assert f"(commit `{entry['commit'][:7]}`" in first
        elif entry["package"] != "torchao":
            assert entry["version"] in first


@pytest.mark.parametrize(("stack", "entry"), INSTALLED, ids=lambda part: part if isinstance(part, str) else "")
def test_every_name_stands_in_the_installed_version(stack: str, entry: dict):
    pytest.importorskip(entry["package"])
    installed = importlib.metadata.version(entry["package"])
    assert f"{installed}.".startswith(f"{entry['version']}."), f"read docs/migration.md again: {stack}"
    assert list(absent(entry, lambda file: (SITE / file).read_text())) == []
