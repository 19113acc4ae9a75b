"""The arithmetic of the report, from entries written by hand."""

import pytest

from benchmarks.ledger import roofline
from benchmarks.ledger.entry import Amount, Entry, amounts, format_of
from benchmarks.ledger.moved import Operation
from benchmarks.ledger.recorder import Record

SHAPE = {"name": "tiny", "layers": 1, "hidden": 8, "vocab": 16, "sequence": 100}
RATES = roofline.Rates("by hand", {**roofline.assumed().values, "bfloat16": 1e12, "bandwidth": 1e9, "gap": 1e-3})


def by_hand(contender="lightning bf16-mixed, compiled"):
    forward = Amount(kernels=2, products=1, bytes=3_000_000, product_flops={"bfloat16": 5_000_000_000})
    stretches = {
        "forward": {"0": forward},
        "backward": {"0": Amount(attention_flops=0, kernels=1), "outside": Amount(bytes=1_000_000)},
        "optimizer": {"outside": Amount(kernels=1, bytes=2_000_000)},
    }
    peaks = {f"peak in {phase}": 4_000_000_000 for phase in ("forward", "backward", "optimizer")}
    return Entry(
        contender=contender, device="a GPU", shape=SHAPE, batch=1, parameters=1_000_000, stretches=stretches, waits=[],
        refused=[], mallocs=0, graphs=1, graph_breaks={}, loose={}, kernels=["a"], host_ms=1.0,
        memory={"weights": 4, "gradients": 4, "optimizer": 8, **peaks},
    )  # fmt: skip


def record(what, name="x", info=""):
    return Record(0.0, what, name, info)


def test_a_prediction_is_counts_over_rates():
    """5 GFLOP at 1 TFLOP/s: 5 ms. 3 + 1 MB at 1 GB/s: 4 ms, and 2 ms of the optimizer. 5 launches of 1 ms."""
    found = roofline.predict(by_hand(), RATES)
    assert found.of("products") == pytest.approx(5)
    assert found.of("bytes") == pytest.approx(4)
    assert found.of("optimizer") == pytest.approx(2)
    assert found.of("gaps") == pytest.approx(5)
    assert found.total == pytest.approx(16)


def test_formats_by_dtype_accumulation_and_scales():
    info = "a=float8_e4m3fn b=float8_e5m2 fast={} scales={},{}"
    names = {
        format_of(record("gemm", info=info.format(fast, scales, scales))): None
        for fast, scales in ((1, 0), (0, 0), (1, 3), (0, 5), (0, 2))
    }
    assert list(names) == [
        "float8 fast",
        "float8 exact",
        "float8 row scales fast",
        "float8 block scales exact",
        "mxfp8 exact",
    ]
    assert format_of(record("gemm", info="a=bfloat16 b=bfloat16")) == "bfloat16"
    assert RATES.of_product("float8 row scales fast") == RATES.values["float8 fast"]
    with pytest.raises(KeyError, match="no rate for products of format 'int4'"):
        RATES.of_product("int4")


def test_records_are_sorted_into_phases_and_blocks():
    records = [
        record("mark", "phase forward"), record("kernel", "embedding"),
        record("mark", "block 0"), record("kernel", "triton_a"),
        record("gemm", info="m=2 n=3 k=4 batch=1 a=bfloat16 b=bfloat16"), record("mark", "block outside"),
        record("kernel", "nobody knows"), record("mark", "phase optimizer"), record("kernel", "adam"), record("memset"),
    ]  # fmt: skip
    operations = [Operation("embedding", 1, 2, 100, "elementwise"), Operation("mm", 4, 5, 0, "product", 999),
                  Operation("_fused_adamw_", 8, 9, 28, "elementwise")]  # fmt: skip
    found, loose = amounts(records, operations, {"triton_a": 7})
    assert found["forward"]["0"] == Amount(kernels=1, products=1, bytes=7, product_flops={"bfloat16": 48})
    assert found["forward"]["outside"] == Amount(kernels=2, bytes=100, unknown_bytes=1)
    assert found["optimizer"]["outside"] == Amount(kernels=1, copies=1, bytes=28)
    assert loose == {"nobody knows": 1}
    of_int8 = [*operations[:1], Operation("int8", 3, 4, 0, "product", 48), *operations[1:]]
    found, _ = amounts(records, of_int8, {"triton_a": 7})
    assert found["forward"]["0"] == Amount(products=2, product_flops={"int8": 48, "bfloat16": 48})  # by a kernel
    found, _ = amounts(records, operations, {"triton_a": 7}, {3: 70})
    assert found["forward"]["0"].bytes == 70, "of this launch, of a kernel of any size"
