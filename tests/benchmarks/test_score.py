"""Predictions against published figures: statistics by hand, hand-computed times, and the page as it is written."""

from statistics import fmean

import pytest

from benchmarks.ledger import score
from benchmarks.ledger.roofline import COMMON

pytestmark = pytest.mark.slow

FIGURES = {figure["name"]: figure for figure in score.DATA["figures"]}


def test_errors_and_ranks_are_those_computed_by_hand():
    assert score.error([1.1, 1.8], [1.0, 2.0]) == pytest.approx(0.1)
    assert score.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert score.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)  # 1 - 6 x 2 / (3 x 8)
    assert score.spearman([1.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(3**0.5 / 2)  # cov 1.5, variances 1.5 and 2


def test_a_figure_is_predicted_with_the_factor_of_the_others():
    # the second column is exact for the first two rows, the first column for the third
    assert score.left_out([[2.0, 1.0], [4.0, 2.0], [3.0, 9.0]], [1.0, 2.0, 3.0]) == [0, 0, 1]
    assert score.left_out([[2.0, 1.0], [4.0, 2.0], [9.0, 3.0], [3.0, 9.0]], [1.0, 2.0, 3.0, 3.0])[-1] == 1


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


def test_the_ledger_gives_back_its_own_bytes():
    entry = score.LEDGER[score.BF16_TRUE]
    assert entry.per_block("bytes") == pytest.approx(
        8192 * 81920 * sum(score.counted(score.BF16_TRUE, phase) for phase in ("forward", "backward"))
    )
    # 8 bytes of float32 weights less than what torchao's recipe has above bf16-mixed
    added = sum(score.encoding("tensorwise", phase, score.BLOCK) for phase in ("forward", "backward"))
    between = [score.LEDGER[key].per_block("bytes") for key in (score.COUNTED["tensorwise"], score.BASELINE)]
    assert added * 8192 * 81920 == pytest.approx(between[0] - between[1] - 8 * 218103808)


def test_every_figure_has_an_address_a_setting_and_rates_from_elsewhere():
    assert sum(figure["published"][0] is not None for figure in FIGURES.values()) >= 16
    assert len(FIGURES) == len(score.DATA["figures"])
    for figure in FIGURES.values():
        assert figure["address"].startswith("https://")
        for setting in ("model", "batch", "sequence", "gpus", "precision", "baseline", "silent"):
            assert figure[setting], (figure["name"], setting)
        assert figure["model"] in score.DATA["models"]
    for device in score.DATA["devices"].values():
        assert device["address"].startswith("https://")
        assert device["note"]
    assert all(left["address"].startswith("https://") and left["why"] for left in score.DATA["left_out"])
    rates = score.rates("B300").values
    assert rates["attention forward"] / rates["bfloat16"] == pytest.approx(570 / 690)
    assert rates["bandwidth"] == pytest.approx(8e12 * COMMON["bandwidth"] / 4.8e12)


def test_the_page_is_what_the_command_writes():
    page = score.PAGE.read_text()
    assert score.updated(page) == page
    whole = [figure for figure in FIGURES.values() if figure["published"][0] and "kind" not in figure]
    off = 100 * fmean(abs(score.ratio(figure) / score.measured(figure) - 1) for figure in whole)
    assert f"| steps | {len(whole)} | fixed constants | {off:.1f} |" in page
