"""The README tells the truth about names and commands."""

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

from lightning_lowprec import FP8TE, FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, Int8TorchAO, MXFP8TorchAO
from lightning_lowprec.conversion.name_suffixes import families, split
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", README.split("## The names")[1].split("## ")[0], flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    suffixes = {name for name in listed if name.startswith("-")}
    assert sorted({*listed} - suffixes) == sorted(name for stems in families(TABLE).values() for name in stems)
    assert suffixes == {suffix for found in families(TABLE) for suffix in found}


def test_the_lines_of_suffixes_say_which_names_have_them():
    """`-fp16` after: names. The others: all FP8 names but those that the line excepts."""
    text = README.split("## The names")[1].split("## ")[0]
    line = next(line for line in text.split("\n\n") if "`NAME-fp16`" in line)
    having = {suffix: {stem for found, stems in families(TABLE).items() if suffix in found for stem in stems}
              for suffix in ("-fp16", "-sr")}  # fmt: skip
    said = re.findall(r"`([^`]+)`", line.split("`NAME-fp16`")[1].split(".")[0])
    assert set(said) == having["-fp16"]
    fp8 = {
        name
        for name in TABLE
        if TABLE[name].plugin in (FP8TorchAO, FP8TE, Int8TorchAO, MXFP8TorchAO) and not split(name)[1]
    }
    assert fp8 - having["-sr"] == {"mxfp8", "mxfp8-te", "nvfp4", "fp8-lean"}
    assert "`int8-mixed` and every FP8 name except `mxfp8`, `mxfp8-te`, `nvfp4` and `fp8-lean`" in " ".join(
        text.split()
    )


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
