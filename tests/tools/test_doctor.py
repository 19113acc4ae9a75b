"""`lowprec doctor`: names by family, three names to try first, and none of the noise of other libraries."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import lightning_lowprec
from lightning_lowprec import HalfMixed
from lightning_lowprec.tools.cli import main
from tests.representatives import TABLE
from tests.toys import on_gpu

RUNS = {*TABLE}
FP8 = {name for name in TABLE if TABLE[name].plugin is not HalfMixed}
BYTES = {"bf16-remainder": 14, "fp8-hybrid-remainder": 14, "bf16-8bit": 8}  # 2 + 2 + 2, and two moments of 4 or 1


@cache
def on_cpu():
    return lightning_lowprec.doctor("cpu")


@pytest.mark.parametrize(
    ("machine", "runs", "emulated", "bf16", "names"),
    [
        ("Blackwell, Transformer Engine", RUNS, set(), True, ["half-auto", "mxfp8", "fp8-hybrid"]),
        ("Hopper, torchao", RUNS - {"mxfp8"}, set(), True, ["half-auto", "fp8-hybrid", "fp8-hybrid-remainder"]),
        ("Ampere", RUNS - FP8, set(), True, ["half-auto", "bf16-remainder", "bf16-8bit"]),
        ("Turing", RUNS - FP8, set(), False, ["half-auto", "fp16-master", "32-true"]),
        ("CPU", RUNS, FP8, True, ["half-auto", "bf16-remainder", "fp8-hybrid"]),
    ],
)
def test_every_kind_of_machine_gets_three_names_that_run_there(machine, runs, emulated, bf16, names):
    here = on_cpu()
    verdicts = [replace(here.precisions[0], name=n, runs=True, emulated=n in emulated) for n in runs]
    found = replace(here, facts={**here.facts, "bf16": bf16}, precisions=verdicts)
    assert [row.name for row in found.recommended] == names
    assert {*names} <= {*runs, "32-true"}
    for name, why in found.recommended:
        assert name not in BYTES or f": {BYTES[name]} bytes per parameter with AdamW, not 16" in why
    compare, run = found.as_json()["commands"]
    assert compare.split()[3] == ",".join(names)
    assert run == f"lowprec run --precision={names[1]} train.py"


@pytest.mark.parametrize(
    ("name", "device", "status", "words"),
    [
        ("fp8-rowwise", "sm_120", 1, ["fp8-rowwise on sm_120: no", "CUBLAS_STATUS_NOT_SUPPORTED", "[pytorch#192707]",
                                      "Use 'fp8-hybrid'."]),
        ("mxfp8-te", "sm_121", 1, ["mxfp8-te on sm_120: no", "Use 'fp8-current-te'."]),
        ("mxfp8", "sm_121", 0, ["mxfp8 on sm_120: not known", "[pytorch#198126]"]),
        ("fp8-hybrid-remainder", "gfx942", 1, ["float8_e4m3fnuz only", "Use 'fp8-rowwise'."]),
        ("fp8-hybrid", "sm_86", 1, ["NVIDIA 8.0 to 8.8 (Ampere) has no FP8 tensor cores", "Use 'bf16-mixed'."]),
        ("int8-mixed", "sm_80", 0, ["int8-mixed on sm_80: yes", "[ao#748]"]),
        ("te-mxfp8", "sm_100", 0, ["te-mxfp8 on sm_100: yes"]),
    ],
)  # fmt: skip
def test_another_device_is_answered_for(capsys, name, device, status, words):
    assert main(["doctor", "--for", name, "--device", device]) == status
    printed = capsys.readouterr()
    said, silent = (printed.err, printed.out) if status else (printed.out, printed.err)
    assert silent == ""
    assert all(word in said for word in words), said


def test_another_device_has_a_column_and_unknown_ones_raise_with_what_is_allowed(capsys):
    assert main(["doctor", "--device", "sm_100"]) == 0
    assert capsys.readouterr().out.startswith("Recipes on sm_100, NVIDIA 10.x")
    for name in ("bf16-true", "32-true"):
        assert main(["doctor", "--for", name]) == 0
        assert ("have no masters: small updates are rounded away." in capsys.readouterr().out) == (name == "bf16-true")
    assert main(["doctor", "--device", "sm_100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["te-mxfp8"]["runs"] is True
    for words, message in (
        (["fp8-rowwize", "--device", "sm_90"], r"'fp8-rowwize' is invalid.*fp8-rowwise.*Recipes are allowed"),
        (["fp8-rowwise", "--device", "h300"], r"`device='h300'` is not .*: `device='h300'` is no .*: sm_60, .*cpu"),
    ):
        assert main(["doctor", "--for", *words]) != 0
        assert re.search(message, capsys.readouterr().err)


def test_what_nobody_has_confirmed_is_not_known_and_not_recommended(monkeypatch, tmp_path):
    on_gpu(monkeypatch, (13, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 575.51\necho 575.51")  # of two GPUs
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = lightning_lowprec.doctor()
    assert "\ndriver    575.51\n" in repr(found)
    assert re.search("\ntorchao +not known +fp8-hybrid", repr(found))
    verdicts = {verdict.name: verdict for verdict in found.precisions}
    assert all(verdicts[name].runs and verdicts[name].known for name in ("half-auto", "bf16-remainder"))
    assert (verdicts["fp8-hybrid"].runs, verdicts["fp8-hybrid"].known) == (True, False)
    assert "newer than this table" in verdicts["fp8-hybrid"].reason
    assert [row.name for row in found.recommended] == ["half-auto", "bf16-remainder", "bf16-8bit"]
    on_gpu(monkeypatch, (8, 0))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9")
    found = lightning_lowprec.doctor("cuda:0")
    assert found.facts["driver"] is None
    verdicts = {verdict.name: verdict.runs for verdict in found.precisions}
    assert (verdicts["bf16-8bit"], verdicts["fp8-hybrid"], verdicts["int8-mixed"]) == (True, False, True)
    assert main(["doctor", "--for", "fp8-hybrid"]) == 1


def test_doctor_answers_for_every_name_and_is_short(capsys):
    found = on_cpu()
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == repr(found).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[0] == "Try first on this machine:"
    assert lines[4:7] == [
        "    $ lowprec compare --precisions half-auto,bf16-remainder,fp8-hybrid \\",
        "          --model my.Model --data my.Data",
        "    $ lowprec run --precision=bf16-remainder train.py",
    ]
    assert [verdict.name for verdict in found.precisions] == list(TABLE)
    assert torch.__version__ in repr(found)
    assert "\ndevice    cpu\n" in repr(found)
    assert "fp8-hybrid, also with -fp16, -remainder, -8bit or -sr; fp8-e4m3, " in " ".join(repr(found).split())
    facts = found.as_json()
    assert [row["name"] for row in facts["recommended"]] == ["half-auto", "bf16-remainder", "fp8-hybrid"]
    assert (facts["architecture"], facts["hardware"]["rowwise"]["emulated"]) == ("cpu", True)


def test_reasons_and_broken_libraries_are_said(monkeypatch):
    monkeypatch.setattr("lightning_lowprec.private.torchao.moved", lambda: ["torchao._x", "torchao._y"])
    for library in ("transformers", "deepspeed"):
        monkeypatch.setattr(f"lightning_lowprec.private.{library}.moved", lambda: torch.missing)
    monkeypatch.setattr("lightning_lowprec_autoload.installed_by_torch", False)
    here = lightning_lowprec.doctor("cpu")
    row = replace(here.precisions[0], name="half-auto", runs=False, reason="does not run: no file")
    verdicts = [row, replace(row, name="bf16-remainder", runs=True, reason="")]
    said = " ".join(repr(replace(here, precisions=verdicts)).split())
    assert "half precision no half-auto: does not run: no file" in said
    for library in ("transformers", "deepspeed"):
        assert f"warning {library} is installed and does not import: AttributeError: module 'torch' has no" in said
    assert "the installed libraries are not all supported; they no longer have: torchao._x, torchao._y" in said
    assert "names known after `import lightning_lowprec`" in said
