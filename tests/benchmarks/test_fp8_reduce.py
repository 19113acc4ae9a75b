"""The committed losses of float8 reduction: the docs show them, and float8 ends where float32 ends."""

import json
from pathlib import Path

from benchmarks.fp8_reduce import WAYS, markdown

ROOT = Path(__file__).parents[2]
PAGE = json.loads((ROOT / "benchmarks" / "results" / "cpu-2026-11-23" / "fp8_reduce.json").read_text())


def test_the_docs_show_the_results():
    docs = (ROOT / "docs" / "many-machines.md").read_text().split("<!-- fp8_reduce")[1].split("<!-- /fp8_reduce")[0]
    assert docs.split("\n", 1)[1].strip() == markdown(PAGE)


def test_500_steps_in_float8_end_within_a_thousandth_of_float32():
    assert (PAGE["steps"], tuple(PAGE["runs"])) == (500, WAYS)
    for ours, reference in zip(PAGE["runs"]["float8"], PAGE["runs"]["float32"], strict=True):
        assert reference["loss"] < 2.1, "it has learned something: 5.5 at the beginning"
        assert abs(ours["loss"] - reference["loss"]) < 1e-3
        assert 30 < ours["snr"] < 40
        assert reference["snr"] > 140
