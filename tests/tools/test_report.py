"""The report: one file, complete, honest about what it measured."""

import base64
import io
from html.parser import HTMLParser

import pytest

from lightning_lowprec.tools.compare.pictures import smooth
from lightning_lowprec.tools.compare.report import write_report
from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.compare.table import render

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tags and text, and checks that tags nest."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.images, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def trained(name, offset=0.0, **kwargs):
    figures = {
        "train_losses": [5.0 - 0.1 * i + offset for i in range(20)], "step_seconds": [0.1] * 20,
        "val_steps": [10, 20], "val_losses": [4.0 + offset, 3.0 + offset], "peak_memory": 3 * 2**20,
        "memory_kind": "peak of something", "device": "CPU (a chip)", "device_type": "cpu", "threads": 2,
        "versions": {"torch": "2.99"},
    }  # fmt: skip
    return PrecisionResult(name=name, **{**figures, **kwargs})


def report(tmp_path, results, **kwargs):
    names = [result.name for result in results]
    comparison = Comparison(spec=CompareSpec(precisions=names, out=tmp_path, **kwargs), results=results)
    write_report(comparison)
    page = Page()
    page.feed(comparison.report.read_text())
    page.close()
    assert page.open == [], "every tag is closed"
    return page, comparison


def test_it_needs_nothing_but_itself(tmp_path):
    page, comparison = report(tmp_path, [trained("32-true"), trained("bf16-mixed", 0.01)])
    assert "http" not in comparison.report.read_text()
    for name, value in page.attributes:
        assert name not in ("href", "srcset")
        assert name != "src" or value.startswith("data:image/png;base64,")


def test_pictures_decode_and_the_first_is_loss_png(tmp_path):
    from PIL import Image

    page, _ = report(tmp_path, [trained("32-true"), trained("fp8-hybrid", 0.01)])
    pictures = [base64.b64decode(image["src"].partition(",")[2], validate=True) for image in page.images]
    assert len(pictures) == 2
    assert pictures[0] == (tmp_path / "loss.png").read_bytes()
    for picture, image in zip(pictures, page.images, strict=True):
        drawn = Image.open(io.BytesIO(picture))
        drawn.load()
        assert drawn.width >= 1000
        assert len(drawn.convert("RGB").getcolors(2**24)) > 20, "something is drawn"
        assert image["alt"]


def test_it_says_what_was_measured_where_and_how(tmp_path):
    page, _ = report(tmp_path, [trained("32-true"), trained("fp8-hybrid", 0.01, notes=["converted 4 of 5"])], seed=17)
    for text in ("FP8 is emulated", "say nothing about a GPU", "CPU (a chip)", "2.99", "17", "peak of something"):
        assert text in page.text
    for text in ("within 1%", "+0.33%", "100.0 ms", "3 MiB", "converted 4 of 5", "Every precision trained"):
        assert text in page.text


@pytest.mark.parametrize(
    ("names", "device", "emulated", "cpu"),
    [
        (["32-true", "bf16-mixed"], "cpu", False, True),
        (["fp8-rowwise"], "cpu", True, True),
        (["32-true", "mxfp8"], "cuda", False, False),
    ],
)
def test_remarks_about_the_cpu(tmp_path, names, device, emulated, cpu):
    page, comparison = report(tmp_path, [trained(name, device_type=device) for name in names])
    for text in (page.text, render(comparison)):
        assert ("FP8 is emulated" in text) is emulated
        assert ("say nothing about a GPU" in text) is cpu


def test_failures_are_shown(tmp_path):
    failed = PrecisionResult(name="fp8-hybrid", error="Traceback\nValueError: <b>bad</b> & worse")
    page, comparison = report(tmp_path, [trained("32-true"), failed, trained("bf16-mixed", 1.0)])
    assert "Not every precision ended with" in page.text
    assert "fp8-hybrid, bf16-mixed." in page.text
    assert "Traceback\nValueError: <b>bad</b> & worse" in page.text
    assert "<b>bad" not in comparison.report.read_text()
    assert "off by more than 1%" in page.text
    assert "failed: ValueError" in render(comparison)


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
    page, comparison = report(tmp_path, results)
    assert len(page.images) == 2
    assert len(render(comparison).splitlines()) > len(results)


def test_the_table_lines_up():
    spec = CompareSpec(precisions=["32-true", "bf16-mixed"], val_metric="score")
    lines = render(Comparison(spec=spec, results=[trained("32-true"), trained("bf16-mixed")])).splitlines()
    assert lines[0].split() == [
        "precision",
        "score",
        "gap",
        "train",
        "loss",
        "step",
        "time",
        "peak",
        "memory",
        "verdict",
    ]
    column = lines[0].index("verdict")
    assert [line[column:] for line in lines[1:3]] == ["baseline", "within 1%"]


def test_smoothing_is_a_mean_of_both_sides():
    assert smooth([1.0, 3.0, 5.0, 7.0], 1) == [2.0, 3.0, 5.0, 6.0]
    assert smooth([1.0, 2.0], 0) == [1.0, 2.0]
