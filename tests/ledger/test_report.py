"""The arithmetic of the report, from an entry written by hand."""

import pytest

from benchmarks.ledger import roofline
from benchmarks.ledger.entry import Amount, Entry

RATES = roofline.Rates("by hand", {**roofline.assumed().values, "bfloat16": 1e12, "bandwidth": 1e9, "gap": 1e-3})


def test_a_prediction_is_counts_over_rates():
    """5 GFLOP at 1 TFLOP/s: 5 ms. 3 + 1 MB at 1 GB/s: 4 ms, and 2 ms of the optimizer. 5 launches of 1 ms."""
    forward = Amount(kernels=2, products=1, bytes=3_000_000, product_flops={"bfloat16": 5_000_000_000})
    stretches = {
        "forward": {"0": forward},
        "backward": {"0": Amount(attention_flops=0, kernels=1), "outside": Amount(bytes=1_000_000)},
        "optimizer": {"outside": Amount(kernels=1, bytes=2_000_000)},
    }
    entry = Entry(
        contender="lightning bf16-mixed, compiled", device="a GPU", batch=1, parameters=1_000_000, stretches=stretches,
        shape={"name": "tiny", "layers": 1, "hidden": 8, "vocab": 16, "sequence": 100}, waits=[], refused=[], mallocs=0,
        graphs=1, graph_breaks={}, loose={}, kernels=["a"], host_ms=1.0, memory={},
    )  # fmt: skip
    found = roofline.predict(entry, RATES)
    assert found.of("products") == pytest.approx(5)
    assert found.of("bytes") == pytest.approx(4)
    assert found.of("optimizer") == pytest.approx(2)
    assert found.of("gaps") == pytest.approx(5)
    assert found.total == pytest.approx(16)
