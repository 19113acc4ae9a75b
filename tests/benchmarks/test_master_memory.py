"""Bytes per parameter, against what each form promises."""

import pytest

from benchmarks.master_memory import PLUGINS, measure

AT_REST = {  # weights + gradients + masters + two moments
    "32-true": 4 + 4 + 0 + 8,
    "bf16-mixed": 4 + 4 + 0 + 8,
    "bf16-true": 2 + 2 + 0 + 4,
    "bf16-master": 2 + 2 + 4 + 8,
    "bf16-master, float32 gradients": 2 + 4 + 4 + 8,
    "bf16-remainder": 2 + 2 + 2 + 8,
    "bf16-sr": 2 + 2 + 0 + 8,
    "fp16-master": 2 + 2 + 4 + 8,
}


@pytest.mark.parametrize("name", PLUGINS)
def test_bytes_at_rest(name):
    row = measure(name)
    assert row["rest"] == pytest.approx(AT_REST[name], abs=0.02)
    assert row["rest"] <= row["peak"] <= 24


def test_float32_gradients_cost_nothing_more_in_the_step():
    """They are handed over to the masters; half-precision ones are copied to float32 there."""
    row = measure("bf16-master, float32 gradients")
    assert row["peak"] == pytest.approx(row["rest"], abs=0.02)
