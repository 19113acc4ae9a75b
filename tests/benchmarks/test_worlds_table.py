"""The counted worlds: the docs show the results, the results equal the formula, and the formula still says the same."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.ledger.world_case import Case, Model, promised
from benchmarks.ledger.worlds_report import expected, markdown, summary

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "null-gpu-2026-11-22"
PAGE = json.loads((RESULTS / "worlds.json").read_text())


def test_the_docs_and_the_page_show_the_results():
    docs = (ROOT / "docs" / "fsdp2.md").read_text().split("<!-- worlds")[1].split("<!-- /worlds")[0]
    assert docs.splitlines()[1:] == summary(PAGE)
    assert (RESULTS / "worlds.md").read_text() == markdown(PAGE)


def test_every_count_equals_the_formula_and_every_state_the_plan():
    assert {row["outcome"] for row in PAGE["rows"]} == {"ok"}
    for row in PAGE["rows"]:
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "scales"):
            assert row["wire"][kind] == expected(row, kind), (row["shape"], row["world"], row["precision"], kind)
        if row["layers"] >= 32:
            # every weight has its own tensor of remainders, whose size the allocator rounds up
            most = 1.03 if row["precision"] == "bf16-remainder" else 1.02
            assert 1 <= row["memory"]["state"] / row["promised"]["state"] <= most


@pytest.mark.parametrize("chosen", [{"world": 8, "shape": "8b"}, {"world": 512, "copies": 1, "shape": "8b"}])
def test_the_formula_and_the_plan_still_promise_the_same(chosen):
    rows = [row for row in PAGE["rows"] if row["layers"] == 4 and chosen.items() <= row.items()]
    assert len(rows) >= 8
    for row in rows:
        sizes = {name: row[name] for name in ("shape", "world", "precision", "layers", "copies", "tensor", "tokens")}
        case = Case(**sizes)
        assert promised(case, _on_meta(case)) == row["promised"]


def _on_meta(case):
    with torch.device("meta"):
        return Model(case.size)
