"""`lowprec compare --seeds`: paired differences and their intervals."""

import json
import math

import pytest

from lightning_lowprec.tools.compare.comparison import Comparison, markdown, picture
from lightning_lowprec.tools.compare.result import (
    Interval,
    PrecisionResult,
    judge_seeds,
    student_t,
)
from lightning_lowprec.tools.compare.spec import CompareSpec
from tests.tools.comparing import compare

pytestmark = pytest.mark.slow

# ---- a real run


def test_seeds_are_compared_in_pairs(tmp_path):
    status, stdout, stderr = compare(
        [
            *("--precisions=bf16-mixed,fp8-hybrid", "--model-args", "{depth: 1, width: 16, heads: 1, block_size: 16}"),
            *("--data-args", '{"block_size": 16, "max_bytes": 20000}', "--accelerator=cpu"),
            *("--max-steps=24", "--val-every=10", "--val-batches=2", f"--out={tmp_path}", "--seed=3", "--seeds=2"),
            *("--max-loss-gap=1000", "--monitor"),
        ],
        tmp_path,
    )
    assert status == 0, stdout + stderr
    assert "fp8-hybrid, seed 4 (4 of 4): 100%" in stderr
    figures = json.loads((tmp_path / "results.json").read_text())
    runs = {(run["seed"], run["name"]): run["train_losses"] for run in figures["results"]}
    assert [*runs] == [(seed, name) for seed in (3, 4) for name in ("bf16-mixed", "fp8-hybrid")]
    for seed in (3, 4):
        baseline, fp8 = runs[seed, "bf16-mixed"], runs[seed, "fp8-hybrid"]
        assert fp8 != baseline
        assert fp8 == pytest.approx(baseline, rel=0.01), "the same weights, the same data"
        assert baseline[0] == pytest.approx(math.log(256), abs=0.1)
        assert (tmp_path / f"fp8-hybrid-seed{seed}.log").is_file()
    assert runs[3, "bf16-mixed"][0] != runs[4, "bf16-mixed"][0]
    _check_differences(figures)
    for run in figures["results"]:
        assert run["val_steps"] == [10, 20, 24], "and after the last step, which no interval hits"
        assert run["peak_memory"] is None, "only a GPU's memory is measured"
        assert run["device"].startswith("CPU (")
        assert ", 1 of " in run["device"], "one thread"
    folder = tmp_path / "monitor" / "fp8-hybrid-seed4"
    readings = [json.loads(line) for line in (folder / "numerics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in readings] == [*range(0, 24, 2)], "a tenth of 24 steps, rounded down"
    assert set(readings[-1]["layers"]) == {f"blocks.0.{name}" for name in ("qkv", "proj", "fc_in", "fc_out")}
    assert f"{folder}." in stdout
    assert not (tmp_path / "monitor" / "bf16-mixed-seed4").exists(), "which converts nothing"
    page = (tmp_path / "report.md").read_text()
    assert "## Final val_loss of each seed" in page
    for said in ("converted 4 of 5", "emulated", "\n- python: ", "\n- torch: ", "\n- lightning-lowprec: "):
        assert said in page


def _check_differences(figures):
    """The mean and the interval of two differences: half of the difference times 12.706 (Student's t, 1 degree)."""
    losses = [run["val_losses"][-1] for run in figures["results"]]
    gaps = [losses[1] / losses[0] - 1, losses[3] / losses[2] - 1]
    baseline, fp8 = figures["precisions"]
    assert baseline["text"] == "baseline"
    assert baseline["cost"] is None
    assert fp8["cost"]["gaps"] == pytest.approx(gaps, rel=1e-9)
    assert fp8["gap"] == fp8["cost"]["gap"]["mean"] == pytest.approx(sum(gaps) / 2, rel=1e-9)
    assert fp8["cost"]["gap"]["half_width"] == pytest.approx(12.7062 * abs(gaps[0] - gaps[1]) / 2, rel=1e-5)


# ---- intervals

TABLE_OF_T = {3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 20: 2.086, 29: 2.045, 30: 2.042, 120: 1.980}
"""The printed table: degrees of freedom, and t for 95 % on two sides."""


@pytest.mark.parametrize(("degrees", "t"), TABLE_OF_T.items())
def test_student_t_is_that_of_the_table(degrees, t):
    assert student_t(degrees) == pytest.approx(t, abs=5.1e-4)


@pytest.mark.parametrize("share", [0.5, 0.95, 0.999])
def test_student_t_has_a_closed_form_for_one_and_two_degrees(share):
    assert student_t(1, share) == pytest.approx(math.tan(math.pi * share / 2), rel=1e-9)
    assert student_t(2, share) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-9)


def test_an_interval_by_hand():
    interval = Interval.of([0.01, 0.02, 0.03])  # mean 0.02, standard deviation 0.01
    assert interval.mean == pytest.approx(0.02)
    assert interval.half_width == pytest.approx(4.30265 * 0.01 / math.sqrt(3), rel=1e-5)
    assert interval.percent() == "+2.00% ± 2.48%"
    assert interval.holds_zero


# ---- verdicts

BASELINE = (2.0, 4.0, 2.5)
"""Losses of the baseline with three seeds: far apart, which pairs do not feel."""


def runs(finals, name="x", losses=()):
    return [PrecisionResult(name=name, seed=i, val_losses=[v], train_losses=[*losses]) for i, v in enumerate(finals)]


def of_gaps(*gaps, name="x"):
    """Runs whose final losses are off the baseline's by these shares."""
    return runs([value * (1 + gap) for value, gap in zip(BASELINE, gaps, strict=True)], name)


@pytest.mark.parametrize(
    ("gaps", "ok", "words"),
    [
        # half width: 4.303 * 0.001 / sqrt(3) = 0.25 % for gaps that are 0.1 % apart
        ((0.003, 0.004, 0.005), True, "within 1%"),
        ((0.029, 0.030, 0.031), False, "worse by 3.00% ± 0.25%"),
        ((-0.029, -0.030, -0.031), False, "better by 3.00% ± 0.25%"),
        ((0.008, 0.009, 0.010), False, "worse by 0.90% ± 0.25%"),  # up to 1.15 %
        (
            (0.0, 0.001, 0.002),
            True,
            "not told apart: the spread between seeds (±0.25%) is larger than the difference (+0.10%)",
        ),
        (
            (-0.01, 0.003, 0.01),
            False,
            "not told apart: the spread between seeds (±2.52%) is larger than the difference (+0.10%); more seeds may"
            " tell whether it is within 1%",
        ),
        ((0.0, 0.0, 0.0), True, "equal with every seed"),
    ],
)
def test_the_whole_interval_counts(gaps, ok, words):
    verdict = judge_seeds(of_gaps(*gaps), runs(BASELINE), 0.01)
    assert (verdict.ok, verdict.text) == (ok, words)
    assert verdict.gap == pytest.approx(sum(gaps) / 3)
    assert verdict.cost.gaps == pytest.approx(gaps)


def test_one_seed_that_fails_fails_the_precision():
    failed = of_gaps(0.0, 0.0, 0.0)
    failed[1].error = "Traceback\nBoom: it broke"
    assert judge_seeds(failed, runs(BASELINE), 0.01).text == "seed 1: failed: Boom: it broke"
    verdict = judge_seeds(of_gaps(0.0, 0.0, 0.0), failed, 0.01)
    assert verdict.text == "seed 1: not judged: the baseline x has no finite result"
    assert verdict.cost is None
    assert judge_seeds(runs((2.0, math.nan, 2.0)), runs(BASELINE), 0.01).text.startswith("seed 1: final validation")


def test_seeds_without_effect_are_no_evidence():
    verdict = judge_seeds(runs((2.0, 2.0), "y"), runs((2.0, 2.0)), 0.01)
    assert not verdict.ok
    assert "neither weights nor batches depend on the seed" in verdict.text
    assert verdict.cost is None


# ---- what is shown


def three(gaps=(0.001, 0.002, 0.003)):
    """A comparison over three seeds."""
    results = []
    for i, (final, gap) in enumerate(zip(BASELINE, gaps, strict=True)):
        for name, value in (("32-true", final), ("bf16-mixed", final * (1 + gap))):
            results.append(PrecisionResult(name=name, seed=i, train_losses=[5.0, value] * 200, val_steps=[200, 400],
                                           val_losses=[2 * value, value]))  # fmt: skip
    return Comparison(spec=CompareSpec(precisions=["32-true", "bf16-mixed"], seeds=3), results=results)


def test_the_table_and_the_sentence():
    """The interval of 0.1 % apart is 0.25 % wide on each side: 4.303 * 0.1 / sqrt(3)."""
    shown = str(three(gaps=(0.004, 0.005, 0.006)))
    assert "bf16-mixed costs 0.50% ± 0.25% of val_loss." in shown
    row = next(line for line in shown.splitlines() if line.startswith("bf16-mixed  "))
    for cell in ("+0.50% ± 0.25%", "within 1%"):
        assert cell in row
    baseline = next(line for line in shown.splitlines() if line.startswith("32-true"))
    assert "2.8333 ± 1.0408" in baseline, "mean and standard deviation of 2, 4 and 2.5"


def test_a_cost_below_the_spread():
    assert "bf16-mixed cannot be told apart from the baseline: +0.20% ± 0.25% of val_loss." in str(three())
    page = markdown(three())
    assert "\n| 1    |  4.0000 |     4.0080 |\n" in page
    assert "Every precision trained" in page
    assert "(the whole 95 % confidence interval over 3 seeds)" in page


def test_curves_have_bands_over_seeds():
    """The band of the gaps is the interval, that of the losses reaches from the least to the largest seed."""
    comparison = three()
    train, val, gap = picture(comparison.spec, comparison.runs).axes
    assert len(train.collections) == len(val.collections) == len(gap.collections) == 2
    heights = gap.collections[1].get_paths()[0].vertices[:, 1]
    half_width = 100 * 4.30265 * 0.001 / math.sqrt(3)
    assert (heights.min(), heights.max()) == pytest.approx((0.2 - half_width, 0.2 + half_width), rel=1e-5)
    heights = val.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (2.0, 8.0)


# ---- before anything is trained
