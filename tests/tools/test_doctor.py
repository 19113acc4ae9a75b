"""`lowprec doctor`: names by family, three names to try first, and none of the noise of other libraries."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_lowprec
from lightning_lowprec import HalfMixed
from lightning_lowprec.conversion.name_suffixes import families, split
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.recommendation import commands, recommend

ROOT = Path(lightning_lowprec.__file__).parents[1]
RUNS = {*TABLE}
FP8 = {name for name in TABLE if TABLE[name].plugin is not HalfMixed}


def doctor():
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "lightning_lowprec.tools.cli", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environ)


def test_it_is_short_and_ends_with_a_recommendation_and_nothing_else_is_printed():
    ran = doctor()
    assert ran.stderr == ""
    lines = ran.stdout.splitlines()
    assert len(lines) <= 40
    for family in ("half precision", "FP8, best backend", "torchao", "Transformer Engine", "MS-AMP"):
        assert len([line for line in lines if re.match(rf"{family} +(yes|no|emulated) ", line)]) == 1
    start = lines.index("Try first on this machine:")
    names = [line.split()[0] for line in lines[start + 1 : start + 4]]
    assert names == ["half-auto", "bf16-remainder", "fp8-hybrid"], "on CPU"
    assert lines[start + 4 :] == [
        "    $ lowprec compare --precisions half-auto,bf16-remainder,fp8-hybrid --model my.Model --data my.Data",
        "    $ lowprec run --precision=bf16-remainder train.py",
    ]
    for suffixes, stems in families(TABLE).items():
        for stem in stems:
            line = next(line for line in lines if re.search(rf"(?<![\w-]){stem}(?![\w-])", line))
            group = next(part for part in line.split("; ") if re.search(rf"(?<![\w-]){stem}(?![\w-])", part))
            assert set(re.findall(r"(?<= )-[\w]+", group)) == set(suffixes), stem
    members = {name for name in TABLE if name.partition("-")[0] == "fp8" and split(name)[1]}
    assert members
    assert not members & set(re.findall(r"[\w-]+", ran.stdout)), "families and suffixes, not members"


def test_json_has_the_recommendation_too(capsys):
    assert main(["doctor", "--json", "--device=cpu"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in facts["recommended"]] == ["half-auto", "bf16-remainder", "fp8-hybrid"]
    assert {row["name"] for row in facts["precisions"]} == {*TABLE}
    assert facts["commands"][0].startswith("lowprec compare --precisions half-auto,")


@pytest.mark.parametrize(
    ("machine", "runs", "emulated", "bf16", "names"),
    [
        ("Blackwell, Transformer Engine", RUNS, set(), True, ["half-auto", "mxfp8", "fp8-hybrid"]),
        ("Hopper, torchao", RUNS - {"mxfp8"}, set(), True, ["half-auto", "fp8-hybrid", "fp8-hybrid-remainder"]),
        ("Ampere", RUNS - FP8, set(), True, ["half-auto", "bf16-remainder", "bf16-sr"]),
        ("Turing", RUNS - FP8, set(), False, ["half-auto", "fp16-master", "32-true"]),
        ("CPU", RUNS, FP8, True, ["half-auto", "bf16-remainder", "fp8-hybrid"]),
    ],
)
def test_every_kind_of_machine_gets_three_names_that_run_there(machine, runs, emulated, bf16, names):
    recommended = recommend(runs, emulated, bf16=bf16)
    assert [row.name for row in recommended] == names
    assert {*names} <= {*runs, "32-true"}
    assert commands(recommended)[0].split()[3] == ",".join(names)
    assert commands(recommended)[1] == f"lowprec run --precision={names[1]} train.py"
