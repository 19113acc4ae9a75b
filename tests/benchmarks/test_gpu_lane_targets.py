"""What follows from the figures, by hand: bounds, targets, what compares with what."""

import pytest

from benchmarks.gpu_lane import figures, report, targets
from benchmarks.gpu_lane.contenders import BASELINE, BF16_WEIGHTS, MAIN, MAIN_TE, TE_COMPILED

RUN = {"date": "2030-01-02", "commit": "abc", "smoke": False, "parts": ["x"], "machine": {"device": "NVIDIA H200"}}


def linear_entry(m, k, n, **ms):
    runs = {name.replace("_", " "): {"status": "ok", "ms": value} for name, value in ms.items()}
    return {"status": "ok", "figures": {"m": m, "k": k, "n": n, "runs": runs}}


def with_float32(entry, **ms):
    """The columns of a row with float32 weights, which the steps have."""
    runs = {f"{name.replace('_', ' ')}, float32 weights": {"status": "ok", "ms": v} for name, v in ms.items()}
    entry["figures"]["runs"] |= runs


def step(ms, linear=None, shapes=None, share=0.0):
    found = {
        "ms": ms,
        "linear": linear,
        "fp8_shapes": shapes or {},
        "fp8_share": share,
        "tokens": 8192,
        "tokens_per_s": 8192e3 / ms,
    }
    return {"status": "ok", "figures": found}


@pytest.fixture
def measured():
    data = {"schema": 1, "runs": [RUN], "parts": {}}
    peaks = {"status": "ok", "figures": {"tflops": {"fp8 tensorwise": 1000.0}}}
    rows = [
        linear_entry(8192, 8192, 8192, bf16=10.0, torchao_tensorwise=6.0, te_delayed=5.0),
        linear_entry(8192, 4096, 4096, bf16=4.0, torchao_tensorwise=3.0),
    ]
    with_float32(rows[0], bf16=11.0, torchao_tensorwise=7.5, te_delayed=6.0)
    with_float32(rows[1], bf16=4.5, torchao_tensorwise=3.5)
    data["parts"]["linear"] = {"seconds": 1, "items": {"peaks": peaks, "8192": rows[0], "4096": rows[1]}}
    shapes = {"8192x8192": 2, "4096x4096": 4}
    data["parts"]["step8b"] = {"seconds": 1, "items": {
        BASELINE: step(100.0), "lightning bf16-true, compiled": step(95.0),
        MAIN: step(90.0, "torchao tensorwise", shapes, share=0.8),
        "torchao tensorwise, compiled": step(89.5, "torchao tensorwise", shapes),
    }}  # fmt: skip
    return data


def test_bounds_and_targets_by_hand(measured):
    rows = figures.linear_rows(measured)
    ours = measured["parts"]["step8b"]["items"][MAIN]["figures"]
    saved = 2 * (11 - 7.5) + 4 * (4.5 - 3.5)
    assert figures.amdahl(ours, 100.0, rows) == pytest.approx(100 / (100 - saved))
    found = {target["target"]: target for target in targets.targets(measured)}
    over_best = found["8B stack, fp8-hybrid: over Lightning's best bf16"]
    assert (over_best["measured"], over_best["met"]) == (pytest.approx(95 / 90), False)
    share = found["8B stack, fp8-hybrid: share of the Amdahl bound over bf16-mixed, compiled"]
    assert (share["measured"], share["met"]) == (pytest.approx((100 / 90) / (100 / 89)), True)
    assert found["8B stack, fp8-hybrid: over raw torchao + compile"]["measured"] == pytest.approx(89.5 / 90)
    assert found["8B stack, fp8-hybrid: over raw TE"]["met"] is None
    large = found["linears of the 8192 class, the slowest of them, by its best recipe"]
    assert (large["measured"], large["met"]) == (2.0, True)
    assert found["8B stack, min_gain='auto': over bf16-mixed, compiled"]["met"] is None


def by_te(data):
    """The same machine with Transformer Engine."""
    data["runs"] = [dict(RUN)]
    items = data["parts"]["step8b"]["items"]
    items[MAIN_TE] = step(70.0, "te delayed", {"8192x8192": 2}, share=0.8)
    items |= {"te delayed": step(69.0), "accelerate te": step(70.0), "lightning transformer-engine": step(71.0)}
    items[targets.BY_GAIN] = step(101.0)
    return data


def test_transformer_engines_layers_are_judged_as_torchaos_are(measured):
    found = {t["target"]: (t["measured"], t["met"]) for t in targets.of_the_stack(by_te(measured), MAIN_TE)}
    stack = "8B stack, fp8-hybrid-te: "
    assert found[f"{stack}over Lightning's best bf16"] == (pytest.approx(95 / 70), True)
    bound = 100 / (100 - 2 * (11 - 6))
    assert found[f"{stack}share of the Amdahl bound over bf16-mixed, compiled"][0] == pytest.approx(100 / 70 / bound)
    assert found[f"{stack}over raw TE"] == (pytest.approx(69 / 70), False)
    assert found[f"{stack}over raw torchao + compile"] == (pytest.approx(89.5 / 70), True)
    assert found[f"{stack}over Accelerate, TE"] == (1.0, False), "ahead, not level"
    assert found[f"{stack}over Accelerate, torchao"] == (None, None)
    assert found[f"{stack}over Lightning's transformer-engine"] == (pytest.approx(71 / 70), True)
    assert found[f"{stack}over Lightning's bf16-mixed, compiled, whose weights are float32 too"][1], "100 / 70"
    counted = {t["target"]: (t["measured"], t["met"]) for t in targets.targets(measured)}
    assert counted["8B stack, min_gain='auto': over bf16-mixed, compiled"] == (pytest.approx(100 / 101), True)
    assert not [text for text in counted if "fp8-hybrid-te" in text], "shown beside, not counted"


LIKE_FOR_LIKE = "8B stack, fp8-hybrid, bf16 weights: over Lightning's bf16-true, compiled"


def test_bf16_weights_are_judged_against_bf16_weights(measured):
    """Time and bound: float32 weights against bf16-mixed, bf16 weights against bf16-true."""
    items = measured["parts"]["step8b"]["items"]
    items["lightning bf16-true, compiled"]["figures"]["weights"] = "bfloat16"
    items[BF16_WEIGHTS] = step(70.0, "torchao tensorwise", {"8192x8192": 2, "4096x4096": 4})
    items[BF16_WEIGHTS]["figures"]["weights"] = "bfloat16"
    found = {t["target"]: (t["measured"], t["met"]) for t in targets.targets(measured)}
    assert found[LIKE_FOR_LIKE] == (pytest.approx(95 / 70), True)
    ours, rows = items[BF16_WEIGHTS]["figures"], figures.linear_rows(measured)
    assert figures.counterpart(ours) == "lightning bf16-true, compiled"
    assert figures.counterpart(items[MAIN]["figures"]) == BASELINE
    saved = 2 * (10 - 6) + 4 * (4 - 3)
    assert figures.amdahl(ours, 95.0, rows) == pytest.approx(95 / (95 - saved))
    assert figures.ratios(rows[8192, 8192, 8192])["te delayed, float32 weights"] == pytest.approx(11 / 6)
    assert not any("float32" in gain["recipe"] for gain in figures.gains(measured)), "plans are for one dtype"


def test_the_report_settles_what_fp8_hybrid_should_mean(measured):
    line = "fp8-hybrid: not settled on NVIDIA H200 (ours fp8-hybrid-te not measured)."
    assert line in report.render(measured)
    data = by_te(measured)
    for name, peak in ((MAIN, 81.9e9), (MAIN_TE, 96.6e9)):
        data["parts"]["step8b"]["items"][name]["figures"] |= {"layers": 16, "samples": [0] * 16, "peak_bytes": peak}
    data["parts"]["step8b"]["items"] |= {TE_COMPILED: step(65.0)}
    for entry in data["parts"]["step8b"]["items"].values():
        entry["figures"]["layers"] = 16
    assert targets.faster_backend(data) == (
        "fp8-hybrid: Transformer Engine (ours fp8-hybrid-te) is 1.286 times as fast as torchao (ours fp8-hybrid) on"
        " NVIDIA H200 (evidence: step8b, 16 layers, 8192 tokens per step, medians of 16 steps: 70.0 ms against 90.0 ms;"
        " peak memory 96.6 GB against 81.9 GB; fp8-hybrid-te, blocks compiled 65.0 ms)."
    )
    data["parts"]["step8b"]["items"][MAIN_TE]["figures"]["ms"] = 100.0
    assert targets.faster_backend(data).startswith("fp8-hybrid: torchao (ours fp8-hybrid) is 1.111 times as fast")
    data["runs"][0]["values"] = False
    assert targets.faster_backend(data) == "fp8-hybrid: not settled on NVIDIA H200 (the figures mean nothing)."
    assert {target["met"] for target in targets.targets(data)} == {None}


def test_the_report_says_value_target_and_verdict_of_both(measured):
    text = report.render(by_te(measured)).split("## Targets")[1].split("##")[0]
    assert "| 8B stack, fp8-hybrid-te: over Lightning's best bf16 | 1.357 | >= 1.35 | reached |" in text
    assert "| 8B stack, fp8-hybrid-te: over raw TE | 0.986 | >= 0.99 | **not reached** |" in text
    assert "| 8B stack, fp8-hybrid: over Lightning's best bf16 | 1.056 | >= 1.35 | **not reached** |" in text
    assert "| 8B stack, fp8-hybrid-te: over Accelerate, torchao | - | > 1 | not measured |" in text


@pytest.mark.parametrize("other", [{"tokens": 4096}, {"layers": 8}])
def test_steps_of_another_size_are_not_compared(measured, other):
    measured["parts"]["step8b"]["items"][MAIN]["figures"] |= other
    assert MAIN not in figures.comparable(measured, "step8b")
    assert {t["met"] for t in targets.of_the_stack(measured, MAIN)} == {None}


def test_a_stack_of_fewer_layers_is_no_stack_of_16(measured):
    for entry in measured["parts"]["step8b"]["items"].values():
        entry["figures"]["layers"] = 8
    texts = [target["target"] for target in targets.of_the_stack(measured, MAIN)]
    assert all(text.startswith("8B stack of 8 layers instead of 16, fp8-hybrid: ") for text in texts)


def test_the_linear_table_says_where_fp8_loses(measured):
    rows = measured["parts"]["linear"]["items"]
    rows["small"] = linear_entry(1024, 2048, 1024, bf16=1.0, torchao_tensorwise=1.5, te_delayed=1.1)
    rows["mixed"] = linear_entry(4096, 2048, 2048, bf16=1.0, torchao_tensorwise=1.5, te_delayed=0.9)
    text = report.render(measured)
    assert "Slower than bf16 in every recipe that ran: 1024 x 2048 x 1024." in text
    assert "1.500 (0.67x)" in text
    assert "held back" not in text
    rows["small"]["figures"]["runs"]["te delayed"]["host_ms"] = 2.6
    assert "may be in the times: te delayed at 1024 x 2048 x 1024 (2.6 ms)." in report.render(measured)


def test_a_bound_needs_every_shape(measured):
    rows = figures.linear_rows(measured)
    ours = {**measured["parts"]["step8b"]["items"][MAIN]["figures"], "fp8_shapes": {"8192x1024": 1}}
    assert figures.amdahl(ours, 100.0, rows) is None
    assert figures.amdahl({**ours, "fp8_shapes": {}}, 100.0, rows) is None
