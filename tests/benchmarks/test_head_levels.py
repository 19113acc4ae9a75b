"""The levels of MS-AMP stay within 1.5 % of float32's loss: 60 steps of a small GPT, AdamW."""

import math

import pytest

from benchmarks.head_levels import train

SMALL = {"depth": 2, "width": 64, "block_size": 64}


def test_losses_are_those_of_float32():
    rows = ("32-true, bf16", "msamp-o1, bf16", "msamp-o2, bf16", "msamp-o3, bf16")
    reference, *losses = (train(row, 0, 60, **SMALL) for row in rows)
    assert reference < 0.75 * math.log(256), "it has learned something"
    for row, loss in zip(rows[1:], losses, strict=True):
        assert loss == pytest.approx(reference, rel=0.015), row
        assert loss != reference, "the levels are not float32 under another name"
    assert losses[2] == losses[1], "both multiply by the same float16 weights, rounded to e4m3"
