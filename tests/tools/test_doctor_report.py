"""`lowprec doctor --report`: what a bug report needs, without the folders of paths."""

import sys
from pathlib import Path

import pytest
import torch

import lightning_lowprec
from lightning_lowprec.conversion.name_suffixes import families
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.doctor_report import without_folders

ROOT = Path(lightning_lowprec.__file__).parents[1]
BROKEN = """
import os
raise ImportError(f"{__file__}: cannot open {os.path.expanduser('~')}/secret-folder/libte.so")
"""


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """The report of a user whose Transformer Engine is broken and whose error message has paths."""
    home = tmp_path / "zoe.example"
    package = home / "envs" / "private-project" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    monkeypatch.setenv("HOME", str(home))
    for module in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(package.parent)
    assert main(["doctor", "--report"]) == 0
    return capsys.readouterr().out


def test_it_has_versions_device_backends_and_every_precision_with_a_reason(report):
    for said in (
        torch.__version__,
        lightning_lowprec.__version__,
        "| device ",
        "| backend torchao ",
        "| backend MS-AMP",
    ):
        assert said in report
    for stems in families(TABLE).values():
        assert all(stem in report for stem in stems)
    refused = next(line for line in report.splitlines() if line.startswith("| no ") and "nvfp4" in line)
    assert "which is installed but does not import" in refused
    assert ".../__init__.py: cannot open .../libte.so" in refused
    assert "| transformer_engine does not import " in report
    lines = report.splitlines()
    assert lines[0] == "### `lowprec doctor --report`"
    assert all(line.startswith("|") or not line for line in lines[1:]), "tables alone"
    assert "\x1b" not in report


def test_it_names_no_folder(report):
    for private in (
        "zoe",
        "secret-folder",
        "private-project",
        "envs/",
        str(ROOT),
        sys.prefix,
        "/site-packages",
    ):
        assert private not in report, private


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/ann/.venv/lib/x.so: no such file", ".../x.so: no such file"),
        ("ImportError('/opt/my lab/x.so')", "ImportError('.../x.so')"),
        (r"C:\Users\ann\x.dll is missing", r".../x.dll is missing"),
        ("~/code/train.py", ".../train.py"),
        ("fp16/bf16, `pip install 'a[b]>=2,<3'`, 16 / 4, docs/memory.md", None),
    ],
    ids=["posix", "quoted", "windows", "home", "no-path"],
)
def test_folders_of_paths_are_cut(text, kept):
    assert without_folders(text) == (text if kept is None else kept)


def test_it_is_about_all_of_this_machine(capsys):
    assert main(["doctor", "--report", "--for", "fp8-hybrid", "--json"]) == 2
    assert "`--report` does not go with --for or --json" in capsys.readouterr().err
