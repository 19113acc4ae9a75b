"""What `lowprec compare` makes of its runs: verdicts, intervals over seeds, the report as page and as text."""

import json
import math

import pytest
import torch

from lightning_lowprec.tools.compare import comparison as shown
from lightning_lowprec.tools.compare.comparison import Comparison, PrecisionResult, judge, judge_seeds, markdown
from lightning_lowprec.tools.options import CompareSpec
from lightning_lowprec.tools.output import format_table


def result(name="32-true", **kwargs):
    return PrecisionResult(name=name, **{"val_losses": [3.0, 2.0], "train_losses": [3.0], **kwargs})


def test_the_gap_is_relative_and_the_verdict_has_two_sides():
    for last in (2.0, 2.02, 1.98, 2.021, 1.979, math.nan, math.inf):
        assert judge(result("x", val_losses=[last]), result(), 0.0101).ok is (abs(last - 2) < 0.0205)
    assert judge(result("x", val_losses=[3.0]), result(), 0.5) == shown.Verdict(ok=True, text="within 50%", gap=0.5)
    assert judge(result("x", val_losses=[-3.0]), result(val_losses=[-2.0]), 0.01).gap == -0.5
    zero = result(val_losses=[0.0])
    assert judge(result("x", val_losses=[0.0]), zero, 0.01).ok
    assert not judge(result("x", val_losses=[1e-9]), zero, 0.01).ok
    without = judge(result(val_losses=[]), result(), 0.01)
    assert without.text.startswith("no validation ran: expected training batches")


def test_losses_are_those_of_the_last_tenth_and_times_those_behind_the_warm_up():
    assert result(train_losses=[9.0] * 9 + [1.0]).final_train == 1.0
    assert result(train_losses=[9.0] * 18 + [1.0, 2.0]).final_train == 1.5
    assert result(step_seconds=[9] * 5 + [1, 1, 1, 3, 3, 3]).step_time == 2
    assert result(step_seconds=[9.0, 1.0]).step_time == 1
    assert result().step_time is None


def test_student_t_is_that_of_the_printed_table_and_of_the_closed_forms_for_one_and_two_degrees():
    of_95_percent = {3: 3.182, 4: 2.776, 9: 2.262, 120: 1.980}  # by degrees of freedom
    assert {degrees: shown.student_t(degrees) for degrees in of_95_percent} == pytest.approx(of_95_percent, abs=5.1e-4)
    for share in (0.5, 0.95, 0.999):
        assert shown.student_t(1, share) == pytest.approx(math.tan(math.pi * share / 2), rel=1e-9)
        assert shown.student_t(2, share) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-9)


BASELINE = (2.0, 4.0, 2.5)
"""Losses of the baseline with three seeds: far apart, which pairs do not feel."""


def runs(finals, name="x", losses=()):
    return [PrecisionResult(name=name, seed=i, val_losses=[v], train_losses=[*losses]) for i, v in enumerate(finals)]


def of_gaps(*gaps, name="x"):
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


def test_one_seed_that_fails_fails_the_precision_and_seeds_without_effect_are_no_evidence():
    failed = of_gaps(0.0, 0.0, 0.0)
    failed[1].error = "Traceback\nBoom: it broke"
    assert judge_seeds(failed, runs(BASELINE), 0.01).text == "seed 1: failed: Boom: it broke"
    verdict = judge_seeds(of_gaps(0.0, 0.0, 0.0), failed, 0.01)
    assert verdict.text == "seed 1: not judged: the baseline x has no finite result"
    assert verdict.cost is None
    assert judge_seeds(runs((2.0, math.nan, 2.0)), runs(BASELINE), 0.01).text.startswith("seed 1: final validation")
    without_effect = judge_seeds(runs((2.0, 2.0), "y"), runs((2.0, 2.0)), 0.01)
    assert (without_effect.ok, without_effect.cost) == (False, None)
    assert "neither weights nor batches depend on the seed" in without_effect.text
    ends = shown.Interval(mean=-0.5, half_width=0.5)
    assert (ends.holds_zero, ends.is_within(1.0)) == (True, True), "an interval has its ends"


def three(gaps=(0.001, 0.002, 0.003)):
    results = []
    for i, (final, gap) in enumerate(zip(BASELINE, gaps, strict=True)):
        for name, value in (("32-true", final), ("bf16-mixed", final * (1 + gap))):
            results.append(PrecisionResult(name=name, seed=i, train_losses=[5.0, value] * 200, val_steps=[200, 400],
                                           val_losses=[2 * value, value], step_seconds=[0.1 * (i + 1)] * 20,
                                           peak_memory=2**20 * (i + 1), notes=["converts 4 of 5", "up"]))  # fmt: skip
    return Comparison(spec=CompareSpec(precisions=["32-true", "bf16-mixed"], seeds=3), results=results)


def test_the_table_and_the_sentence():
    """The interval of 0.1 % apart is 0.25 % wide on each side: 4.303 * 0.1 / sqrt(3)."""
    shown = str(three(gaps=(0.004, 0.005, 0.006)))
    assert "bf16-mixed costs 0.50% ± 0.25% of val_loss." in shown
    row = next(line for line in shown.splitlines() if line.startswith("bf16-mixed  "))
    for cell in ("+0.50% ± 0.25%", "within 1%", " 200.0 ms ", " 3.15 MB "):
        assert cell in row
    baseline = next(line for line in shown.splitlines() if line.startswith("32-true"))
    assert "2.8333 ± 1.0408" in baseline, "mean and standard deviation of 2, 4 and 2.5"
    assert "bf16-mixed saves 0.50% ± 0.25% of val_loss." in str(three(gaps=(-0.004, -0.005, -0.006)))
    verdicts = json.loads(three().to_json())["precisions"]
    assert [(verdict["name"], verdict["ok"]) for verdict in verdicts] == [("32-true", True), ("bf16-mixed", True)]
    failed = three()
    failed.results[3].error = "ValueError: no data"
    assert "## bf16-mixed failed with seed 1\n\n    ValueError: no data" in markdown(failed)
    assert "bf16-mixed ends with the baseline's val_loss with every seed." in str(three(gaps=(0.0, 0.0, 0.0)))
    assert "bf16-mixed cannot be told apart from the baseline: +0.20% ± 0.25% of val_loss." in str(three())
    page = markdown(three())
    assert "\n| 1    |  4.0000 |     4.0080 |\n" in page
    assert page.count("- bf16-mixed: converts 4 of 5\n- bf16-mixed: up\n") == 1, "once for all seeds"
    assert "(the whole 95 % confidence interval over 3 seeds)" in page


def test_each_seed_has_a_line_and_values_that_are_not_finite_still_draw(tmp_path):
    comparison = three()
    figure = shown.picture(comparison.spec, comparison.runs)
    train, val, gap = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["32-true", "bf16-mixed"]
    assert {tuple(line.get_xdata()) for line in (*val.lines, *gap.lines)} == {(200, 400)}
    assert len(train.lines) == len(val.lines) == len(gap.lines) == 6  # of two precisions
    assert train.get_title() == "Training loss (mean of 21 steps)"  # a twentieth of 400, on both sides of a step
    assert shown.smooth([1.0, 3.0, 5.0, 7.0], 1) == [2.0, 3.0, 5.0, 6.0]
    ends = sorted(line.get_ydata()[-1] for line in gap.lines[3:])
    assert ends == pytest.approx([0.1, 0.2, 0.3])
    comparison.results[3].val_losses[0] = math.inf
    assert len(shown.picture(comparison.spec, comparison.runs).axes[2].lines) == 6
    report(tmp_path, [trained("a", val_losses=[math.nan], val_steps=[10]), trained("b", train_losses=[math.nan] * 3)])
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def trained(name, offset=0.0, **kwargs):
    figures = {
        "train_losses": [5.0 - 0.1 * i + offset for i in range(20)], "step_seconds": [0.1] * 20,
        "val_steps": [10, 20], "val_losses": [4.0 + offset, 3.0 + offset], "peak_memory": 3 * 2**20,
        "device": "CPU (a chip)", "on_cpu": True,
    }  # fmt: skip
    return PrecisionResult(name=name, **{**figures, **kwargs})


def report(tmp_path, results, **kwargs):
    names = [result.name for result in results]
    comparison = Comparison(spec=CompareSpec(precisions=names, out=tmp_path, **kwargs), results=results)
    shown.write_report(comparison)
    return (tmp_path / "report.md").read_text(), comparison


def test_it_says_what_was_measured_where_and_how(tmp_path):
    page, comparison = report(
        tmp_path, [trained("32-true"), trained("fp8-hybrid", 0.01, notes=["converted 4 of 5"])], seed=17
    )
    for said in ("FP8 is emulated", "say nothing about a GPU", "CPU (a chip)", torch.__version__, "17"):
        assert said in page
    for said in ("within 1%", "+0.33%", "100.0 ms", "3.15 MB", "converted 4 of 5", "Every precision trained"):
        assert said in page
    assert "http" not in page
    assert page.count("](") == page.count("](loss.png)") == 1
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    head, rule, baseline, fp8, *_ = ([cell.strip() for cell in row] for row in table)
    assert head[:2] == ["precision", "val_loss"]
    assert len(rule) == len(head) == len(fp8)
    assert [column.endswith("-:") for column in rule[:2]] == [False, True]
    assert baseline == ["32-true", "3.0000", "+0.00%", "3.1500", "100.0 ms", "3.15 MB", "baseline"]
    assert f'"out": "{comparison.spec.out}"' in page


def test_failures_are_shown(tmp_path):
    failed = PrecisionResult(name="fp8-hybrid", error="Traceback\nValueError: <b>*bad*</b> | worse")
    page, comparison = report(tmp_path, [trained("32-true"), failed, trained("bf16-mixed", 1.0)])
    assert "Not every precision ended with" in page
    assert "fp8-hybrid, bf16-mixed." in page
    assert "    Traceback\n    ValueError: <b>*bad*</b> | worse\n" in page, "as a block of code"
    assert "\\<b>\\*bad\\*\\</b> \\| worse |" in page, "in the table"
    assert "off by more than 1%" in page
    assert "failed: ValueError" in str(comparison)
    page, _ = report(tmp_path, [trained("bf16-sr")])
    assert "Only one precision was asked for" in page
    assert "emulated" not in page
    failed = PrecisionResult(name="32-true", error="ValueError: no data")
    page, _ = report(tmp_path, [failed, trained("fp8-hybrid")])
    assert "Nothing was compared: 32-true, the baseline, has no result (failed: ValueError: no data)." in page
    assert "CPU (a chip)" in page, "of the precision that ran"


def test_a_table_as_text_and_as_markdown():
    rows = [("name", "size"), ("a*", "5"), ("longer", "1234567")]
    assert format_table(rows, right=[1]) == ["name       size", "a*            5", "longer  1234567"]
    assert format_table(rows, right=[1], markdown=True) == [
        "| name   |    size |",
        "|--------|--------:|",
        "| a\\*    |       5 |",
        "| longer | 1234567 |",
    ]
