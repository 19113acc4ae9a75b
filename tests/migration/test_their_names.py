"""Every name of another stack on docs/migration.md has a source, and stands there where the stack is installed."""

import importlib.metadata
import subprocess
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


def test_a_wrong_name_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    page = "```text\nfp9: true\n```\n| there | here |\n| `a.b_c=1`, `--d-e 2` | `ours` |\n"
    assert quoted.quoted(page) == {"fp9", "true", "a", "b_c", "d-e"}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "config.py").write_text("fp8: bool\nxfp9 = fp9x = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    entry = {"repository": "r", "commit": commit, "files": {"config.py": ["fp8", "fp9"]}}
    monkeypatch.setitem(SOURCES, "stack", [entry])
    assert quoted.main(["stack", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "fp9 is not in config.py\n"
    entry["files"] = {"config.py": ["fp8"]}
    assert quoted.main(["stack", str(tmp_path)]) == 0
    entry["commit"] = "0" * 40
    assert quoted.main(["stack", str(tmp_path)]) == 1, "nothing was looked up"
