"""The README tells the truth about names and commands."""

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", README.split("## The names")[1].split("## ")[0], flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == sorted(TABLE)


def test_the_table_of_fsdp2_lists_every_option_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", README.split("## FSDP2")[1].split("## ")[0], flags=re.MULTILINE)
    listed = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    options = {field.name: field.default for field in fields(ShardOptions)}
    arguments = set(signature(FSDP2Strategy).parameters) - {"options"}
    assert arguments == set(signature(FabricFSDP2Strategy).parameters) - {"options"}
    assert set(listed) == set(options) | arguments
    for name, default in options.items():
        assert f"`{default!r}`".replace("'", '"') in listed[name], name


def test_every_command_is_shown():
    assert all(f"lowprec {command}" in README for command in COMMANDS)


def test_the_two_commands_exist():
    assert README.split("```")[1].split()[:2] == ["make", "demo"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", README, flags=re.MULTILINE)) <= set(targets)
