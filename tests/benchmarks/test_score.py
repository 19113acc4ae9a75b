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


def test_the_page_is_what_the_command_writes():
    page = score.PAGE.read_text()
    assert score.updated(page) == page
    assert score.ROWS.read_text() == score.report()[1]
    whole = [figure for figure in FIGURES.values() if figure["published"][0] and "kind" not in figure]
    off = 100 * fmean(abs(score.ratio(figure) / score.measured(figure) - 1) for figure in whole)
    assert f"| steps | {len(whole)} | fixed constants | {off:.1f} |" in page
