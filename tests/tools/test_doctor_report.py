"""`lowprec doctor --report`: what a bug report needs, and nothing about the owner of the machine."""

import socket
import sys
from pathlib import Path

import pytest
import torch

import lightning_lowprec
from lightning_lowprec.conversion.name_suffixes import families
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.doctor_report import without_owner

ROOT = Path(lightning_lowprec.__file__).parents[1]
USER = "zoe.example"
BROKEN = """
import getpass, os, socket
raise ImportError(
    f"{__file__}: cannot open {os.path.expanduser('~')}/secret-folder/libte.so on {socket.gethostname()}"
    f" as {getpass.getuser()}, token {os.environ['SECRET_TOKEN']}"
)
"""


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """The report of a user whose Transformer Engine is broken and whose error message tells everything."""
    home = tmp_path / "zoe.example"
    package = home / "envs" / "private-project" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    for name, value in {"HOME": home, "USER": USER, "LOGNAME": USER, "SECRET_TOKEN": "hunter2"}.items():
        monkeypatch.setenv(name, str(value))
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


def test_it_does_not_name_the_host_the_user_or_a_folder(report):
    for private in (
        "zoe",
        "secret-folder",
        "private-project",
        "hunter2",
        "envs/",
        str(ROOT),
        sys.prefix,
        "/site-packages",
    ):
        assert private not in report, private
    assert "on HOST as USER" in report
    assert f"on {socket.gethostname()}" not in report


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
    assert without_owner(text) == (text if kept is None else kept)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("cpu", "device cpu, torch 2.13"),
        ("torch", "device cpu, torch 2.13"),
        ("a b;$(id)", "device cpu as USER, torch 2.13"),
        ("zoë", "device cpu as USER, torch 2.13"),
        ("x[.*", "device cpu as USER, torch 2.13"),
    ],
)
def test_odd_names_of_users_leave_the_report_readable(user, said, monkeypatch):
    for name, value in {"USER": user, "LOGNAME": user, "KEYMAP": "us", "SSH_KEYS": "cpu", "KEYTIMEOUT": "13"}.items():
        monkeypatch.setenv(name, value)
    assert without_owner(said.replace("USER", user)) == said


def test_odd_names_of_hosts(monkeypatch):
    for host in ("node-7.example.org", "ödd $host", "GPU"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        expected = "on GPU" if host == "GPU" else "on HOST"
        assert without_owner(f"on {host}") == expected
        assert without_owner(f"on {host.partition('.')[0]}") == expected
        assert without_owner("node-77, ödder") == "node-77, ödder"


def test_it_is_about_all_of_this_machine(capsys):
    assert main(["doctor", "--report", "--for", "fp8-hybrid", "--json"]) == 2
    assert "`--report` does not go with --for or --json" in capsys.readouterr().err
