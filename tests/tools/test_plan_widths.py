"""`lowprec plan --precisions`: the bit widths of every precision, against what each of them documents."""

import json

import pytest
import torch

from lightning_lowprec import names as precisions
from lightning_lowprec.msamp import adamw as scaled_adamw
from lightning_lowprec.numerics.formats import FP16
from lightning_lowprec.tools.cli.main import main
from lightning_lowprec.tools.planning import widths as module
from lightning_lowprec.tools.planning.widths import all_names, widths

BACKWARD = ("e5m2, e4m3", "e5m2, e4m3")
DOCUMENTED = {  # output, grad input, grad weight; weight, gradient, master, moments; sent under DDP and FSDP2
    "32-true": ("fp32", "fp32", "fp32", "fp32", "fp32", "-", "fp32", "fp32", "fp32"),
    "bf16-mixed": ("bf16", "bf16", "bf16", "fp32", "fp32", "-", "fp32", "fp32", "bf16"),
    "bf16-true": ("bf16",) * 5 + ("-", "bf16", "bf16", "bf16"),
    "half-auto": ("bf16", "bf16", "bf16", "fp32", "fp32", "-", "fp32", "fp32", "bf16"),
    "bf16-master": ("bf16",) * 5 + ("fp32", "fp32", "bf16", "bf16"),
    "fp16-master": ("fp16",) * 5 + ("fp32", "fp32", "fp16", "fp16"),
    "bf16-remainder": ("bf16",) * 5 + ("int16", "fp32", "bf16", "bf16"),
    "bf16-sr": ("bf16",) * 5 + ("-", "fp32", "bf16", "bf16"),
    "fp8-tensorwise": ("e4m3", *BACKWARD, "fp32", "fp32", "-", "fp32", "fp32", "e4m3"),
    "fp8-e4m3-torchao-fp16": ("e4m3", "e4m3", "e4m3", "fp32", "fp32", "-", "fp32", "fp32", "e4m3"),
    "fp8-rowwise": ("e4m3", "e4m3", "e4m3", "fp32", "fp32", "-", "fp32", "fp32", "bf16"),
    "fp8-rowwise-gw-hp": ("e4m3", "e4m3", "bf16", "fp32", "fp32", "-", "fp32", "fp32", "bf16"),
    "msamp-o1": ("e4m3", *BACKWARD, "fp16", "e4m3", "-", "fp32", "e4m3", "-"),
    "msamp-o2": ("e4m3", *BACKWARD, "fp16", "e4m3", "-", "e4m3, fp16", "e4m3", "-"),
    "msamp-o3": ("e4m3", *BACKWARD, "e4m3", "e4m3", "fp16", "e4m3, fp16", "e4m3", "e4m3"),
}
COLUMNS = ("output", "grad_input", "grad_weight", "weight", "gradient", "master", "moments", "ddp", "fsdp2")


@pytest.fixture(scope="module")
def printed():
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with redirect_stdout(out):
        assert main(["plan", "--precisions", "--json"]) == 0
    return {row["precision"]: row for row in json.loads(out.getvalue())}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_widths_are_those_that_the_precision_documents(printed, name):
    assert tuple(printed[name][column] for column in COLUMNS) == DOCUMENTED[name]


def test_every_precision_has_a_row_and_one_that_does_not_run_says_why(printed):
    assert list(printed) == all_names()
    assert printed.keys() >= precisions.TABLE.keys()
    for name, row in printed.items():
        if row["reason"]:
            assert row["weight"] == row["output"] == "-"
        else:
            assert "-" not in {
                row[column] for column in ("output", "grad_input", "grad_weight", "weight", "moments")
            }, name
    assert printed["16-mixed"]["reason"] == "Lightning takes 'bf16-mixed' instead on the CPU"
    assert printed["mxfp8"]["reason"]


def test_rows_are_read_from_what_runs(monkeypatch):
    monkeypatch.setitem(scaled_adamw._MOMENTS, "exp_avg", FP16)
    assert widths("msamp-o3").moments == "fp16"
    monkeypatch.setitem(precisions.TABLE, "fp8-tensorwise", precisions.TABLE["fp8-rowwise-gw-hp"])
    assert widths("fp8-tensorwise").grad_weight == "bf16"


def test_it_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    widths("bf16-mixed")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_table_is_printed_in_columns(monkeypatch, capsys):
    rows = [
        module.Widths(precision="a", output="e4m3", moments="e4m3, fp16"),
        module.Widths(precision="long-name", reason="no such device"),
    ]
    monkeypatch.setattr(module, "survey", lambda: rows)
    assert main(["plan", "--precisions"]) == 0
    head, a, missing, *_ = capsys.readouterr().out.splitlines()
    assert head.index("output") == a.index("e4m3") == len("long-name") + 2
    assert head.index("moments") == a.index("e4m3, fp16")
    assert missing == "long-name  not here: no such device"


def test_a_plan_wants_a_model(capsys):
    assert main(["plan"]) == 2
    assert "`source` is missing: give a model, or `--precisions`" in capsys.readouterr().err
