"""Predictions against published figures: statistics by hand, hand-computed times, and the page as it is written."""

from statistics import fmean

import pytest

from benchmarks.ledger import score

pytestmark = pytest.mark.slow

FIGURES = {figure["name"]: figure for figure in score.DATA["figures"]}


def test_errors_and_ranks_are_those_computed_by_hand():
    assert score.error([1.1, 1.8], [1.0, 2.0]) == pytest.approx(0.1)
    assert score.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert score.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)  # 1 - 6 x 2 / (3 x 8)
    assert score.spearman([1.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(3**0.5 / 2)  # cov 1.5, variances 1.5 and 2


def test_products_take_the_time_of_the_table_that_their_rates_are_from():
    layer = FIGURES["Transformer Engine, H200 NVL, current"]
    assert score.seconds(layer, low=False) == pytest.approx(31.968e-3, rel=1e-3)
    # operands in elements: fprop and dgrad tokens and weights, wgrad tokens twice; 6 bytes each, at 4.1 TB/s
    products = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
    encoded = sum(2 * a * b + 15872 * (2 * a + 2 * b) for a, b in products)
    assert score.seconds(layer, low=True) == pytest.approx(16.785e-3 + 6 * encoded / 4.1e12, rel=1e-3)


def test_a_step_in_bf16_is_what_its_shapes_say():
    step = score.step(FIGURES["torchao, H100, rowwise"], low=False)
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    repeated = 32 * (4096 * 1024 + 4096**2 + 4096 * 14336)  # every second product: key, output, up
    head = 3 * 4096 * 128256
    found = step.whole()
    assert found.product_flops["bfloat16"] == pytest.approx(2 * 8192 * (3 * weights + repeated + head), rel=1e-4)
    assert found.attention_flops == pytest.approx(3.5 * 32 * 4 * 4096 * 8192**2 / 2)
    forward, backward = (32 * 8192 * 81920 * score.counted(score.BF16_TRUE, phase) for phase in ("forward", "backward"))
    loss = score.LEDGER[f"{score.BF16_TRUE}, chunked loss"].stretches  # of 8,192 tokens and the same vocabulary
    assert step.phase("forward").bytes == pytest.approx(forward + loss["forward"]["outside"].bytes)
    assert step.phase("backward").bytes == pytest.approx(forward + backward + loss["backward"]["outside"].bytes)
    assert step.phase("optimizer").bytes == pytest.approx(28 * (weights + 2 * head / 3) / 8)


def test_the_page_is_what_the_command_writes():
    page = score.PAGE.read_text()
    assert score.updated(page) == page
    assert score.ROWS.read_text() == score.report()[1]
    whole = [figure for figure in FIGURES.values() if figure["published"][0] and "kind" not in figure]
    off = 100 * fmean(abs(score.ratio(figure) / score.measured(figure) - 1) for figure in whole)
    assert f"| steps | {len(whole)} | fixed constants | {off:.1f} |" in page
