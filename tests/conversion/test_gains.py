"""The published gains."""

import pytest

from lightning_lowprec.conversion import gains


@pytest.mark.parametrize(
    ("recipe", "shape", "gain"),
    [  # torchao's README and the thresholds of its automatic filter
        ("tensorwise", (1024, 8192), 1.43),
        ("tensorwise", (8192, 7168), 1.73),
        ("tensorwise", (3584, 8192), 1.71),
        ("tensorwise", (4096, 1024), None),
        ("rowwise", (8192, 7168), 1.73),
        ("rowwise", (1024, 8192), None),
        ("rowwise", (8192, 2048), None),
        ("rowwise", (2048, 4096), None),
    ],
)
def test_published_figures_and_thresholds(recipe, shape, gain):
    assert gains.expected_gain(recipe, *shape) == gain


def test_no_shape_is_too_small_to_ask_for():
    assert gains.expected_gain("tensorwise", 0, 5000) in gains.PUBLISHED.values()
