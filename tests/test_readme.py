"""The README tells the truth about names and commands."""

import re
from pathlib import Path

from lightning_lowprec.cli.main import COMMANDS
from lightning_lowprec.precisions import TABLE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", README.split("## The names")[1].split("## ")[0], flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == sorted(TABLE)


def test_every_command_is_shown():
    assert all(f"lowprec {command}" in README for command in COMMANDS)


def test_the_two_commands_exist():
    assert README.split("```")[1].split()[:2] == ["make", "demo"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", README, flags=re.MULTILINE)) <= set(targets)
