"""The report: complete, honest about what it measured, and readable as Markdown and on a terminal."""

import pytest
import torch

from lightning_lowprec.tools.compare.comparison import Comparison, smooth, write_report
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.output import format_table


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
    write_report(comparison)
    return (tmp_path / "report.md").read_text(), comparison


def table_of(page):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]


def drawn(tmp_path):
    from PIL import Image

    picture = Image.open(tmp_path / "loss.png")
    picture.load()
    return picture


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
    head, rule, baseline, fp8, *_ = table_of(page)
    assert head[:2] == ["precision", "val_loss"]
    assert len(rule) == len(head) == len(fp8)
    assert baseline == ["32-true", "3.0000", "+0.00%", "3.1500", "100.0 ms", "3.15 MB", "baseline"]
    assert f'"out": "{comparison.spec.out}"' in page


@pytest.mark.parametrize(
    ("names", "device", "emulated", "cpu"),
    [
        (["32-true", "bf16-mixed"], "cpu", False, True),
        (["fp8-rowwise"], "cpu", True, True),
        (["32-true", "mxfp8"], "cuda", False, False),
    ],
)
def test_remarks_about_the_cpu(tmp_path, names, device, emulated, cpu):
    page, comparison = report(tmp_path, [trained(name, on_cpu=device == "cpu") for name in names])
    for said in (page, str(comparison)):
        assert ("FP8 is emulated" in said) is emulated
        assert ("say nothing about a GPU" in said) is cpu


def test_failures_are_shown(tmp_path):
    failed = PrecisionResult(name="fp8-hybrid", error="Traceback\nValueError: <b>bad</b> | worse")
    page, comparison = report(tmp_path, [trained("32-true"), failed, trained("bf16-mixed", 1.0)])
    assert "Not every precision ended with" in page
    assert "fp8-hybrid, bf16-mixed." in page
    assert "    Traceback\n    ValueError: <b>bad</b> | worse\n" in page, "as a block of code"
    assert "\\<b>bad\\</b> \\| worse |" in page, "in the table"
    assert "off by more than 1%" in page
    assert "failed: ValueError" in str(comparison)


@pytest.mark.parametrize(
    "results",
    [
        [trained("a", val_losses=[float("nan"), float("inf")], train_losses=[float("nan")] * 3)],
        [PrecisionResult(name="a", error="x"), PrecisionResult(name="b", error="y")],
        [trained("a", val_losses=[0.0, 0.0]), trained("b", peak_memory=None)],
        [trained(f"p{i}", 0.01 * i) for i in range(9)],
    ],
    ids=["not finite", "nothing", "zero", "many"],
)
def test_odd_results_still_draw(tmp_path, results):
    _, comparison = report(tmp_path, results)
    assert drawn(tmp_path).width >= 1000
    assert len(str(comparison).splitlines()) > len(results)


def test_a_table_as_text_and_as_markdown():
    rows = [("name", "size"), ("a*", "5"), ("longer", "1234567")]
    assert format_table(rows, right=[1]) == ["name       size", "a*            5", "longer  1234567"]
    assert format_table(rows, right=[1], markdown=True) == [
        "| name   |    size |",
        "|--------|--------:|",
        "| a\\*    |       5 |",
        "| longer | 1234567 |",
    ]


def test_smoothing_is_a_mean_of_both_sides():
    assert smooth([1.0, 3.0, 5.0, 7.0], 1) == [2.0, 3.0, 5.0, 6.0]
    assert smooth([1.0, 2.0], 0) == [1.0, 2.0]
