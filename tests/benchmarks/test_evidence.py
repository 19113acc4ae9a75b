"""`python -m benchmarks.evidence`: statistics, and a toy run of it all."""

import json
import math
import re
import sys

import pytest

from benchmarks.evidence.__main__ import main
from benchmarks.evidence.gaps import Interval, gaps_of, holm, overview, t_of
from benchmarks.evidence.names import BASELINE
from lightning_lowprec.conversion import backends

pytestmark = pytest.mark.slow


def with_t(t: float) -> list[float]:
    spread = [-2.0, -1.0, 0.0, 1.0, 2.0]  # standard error sqrt(2.5 / 5)
    return [x + t * math.sqrt(0.5) for x in spread]


def test_holm_is_stricter_than_single_intervals_and_milder_than_bonferroni():
    """Table of Student's t with 4 degrees of freedom, two-sided: 2.776 at 5 %, 3.495 at 2.5 %, 3.961 at 5/3 %."""
    assert t_of(with_t(3.7)) == pytest.approx(3.7)
    assert holm({"a": with_t(3.9), "b": with_t(3.7), "c": with_t(0.1)}) == set(), "3.961 is needed of the first"
    assert holm({"a": with_t(4.0), "b": with_t(3.6), "c": with_t(2.7)}) == {"a", "b"}
    assert holm({"a": with_t(4.0), "b": with_t(3.4), "c": with_t(3.3)}) == {"a"}
    assert holm({"a": with_t(2.8)}) == {"a"}


def test_gaps_pair_seeds_and_a_failure_has_none():
    losses = {BASELINE: (2.0, 4.0), "p": (2.2, 4.0), "r": (None, 4.0), "q": (2.0, 4.0)}
    runs = [{"name": name, "seed": seed, "final_val": of[seed]} for seed in (1, 0) for name, of in losses.items()]
    gaps = gaps_of({"spec": {"precisions": [*losses]}, "results": runs})
    assert sorted(gaps["p"]) == pytest.approx([0.0, 0.1])
    assert gaps["r"] is None
    table = overview({"m": gaps, "n": {"p": with_t(9.0)}})
    (row,) = re.findall(r"^\| p .*", table, re.M)
    assert f"**{Interval.of(with_t(9.0)).percent()}**" in row
    assert re.search(r"^\| q +\| +equal \| +- \|$", table, re.M)
    assert re.search(r"^\| r +\| +fails \| +- \|$", table, re.M)


@pytest.fixture
def names_of_its_own():
    """The program registers names, which other tests of this process must not see."""
    yield
    backends.unregister("evidence")
    sys.modules.pop("benchmarks.evidence.devices")


@pytest.mark.usefixtures("names_of_its_own")
def test_the_table_of_a_toy_run_has_the_gaps_of_the_runs(tmp_path):
    call = ["--smoke", "--seeds", "2", "--steps", "4", "--names", "fp8-hybrid@hopper", "--models", "lora", "--out"]
    assert main([*call, str(tmp_path)]) == 0
    report = json.loads((tmp_path / "lora" / "results.json").read_text())
    runs = {(run["name"], run["seed"]): run for run in report["results"]}
    assert {*runs} == {(name, seed) for name in ("32-true", "fp8-hybrid@hopper") for seed in (0, 1)}
    gaps = [runs["fp8-hybrid@hopper", s]["final_val"] / runs["32-true", s]["final_val"] - 1 for s in (0, 1)]
    assert 0 < max(map(abs, gaps)) < 0.02
    assert Interval.of(gaps).percent() in (tmp_path / "gaps.md").read_text()
