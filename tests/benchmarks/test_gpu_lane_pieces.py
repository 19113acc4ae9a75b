"""The pieces of the GPU lane: what goes on after a failure, merging, arithmetic by hand, sizes."""

import json
import time

import pytest
import torch

from benchmarks.gpu_lane import bytes_held, figures, measure, models, runner, setups
from benchmarks.gpu_lane.__main__ import main
from benchmarks.gpu_lane.contenders import BASELINE, MAIN
from benchmarks.gpu_lane.item import Item, missing_library
from benchmarks.gpu_lane.part_tests import parse
from benchmarks.gpu_lane.results import Results, clean, merge
from benchmarks.gpu_lane.running import Job
from benchmarks.gpu_lane.settings import Settings

RUN = {"date": "2030-01-02", "commit": "abc", "smoke": False, "parts": ["x"], "machine": {"device": "NVIDIA H200"}}


class FakePart:
    """Items of the given keys; ``bad`` ones raise."""

    name = "fake"

    def __init__(self, *items):
        self.listed = list(items)
        self.ran = []

    def items(self, settings):
        return self.listed

    def run(self, key, settings):
        self.ran.append(key)
        if key.startswith("bad"):
            raise ValueError(f"{key} is\nbad")
        return {"value": float("nan") if key == "nan" else 1.0}


def run_fake(part, folder, settings=None, seconds=60.0, isolate=False):
    results = Results(folder, RUN)
    runner.run_part(part, settings or Settings(), results, isolate=isolate, deadline=time.monotonic() + seconds)
    return json.loads((folder / "results.json").read_text())["parts"]["fake"]["items"]


def test_a_failing_item_is_recorded_and_the_next_runs(tmp_path):
    part = FakePart(Item(key="bad one"), Item(key="nan"), Item(key="gone", missing="no such library"), Item(key="last"))
    items = run_fake(part, tmp_path)
    assert items["bad one"]["status"] == "failed"
    assert items["bad one"]["reason"] == "ValueError: bad one is bad"
    assert items["nan"]["figures"] == {"value": "nan"}, "JSON has no NaN"
    assert items["gone"] == {"status": "missing", "reason": "no such library"}
    assert items["last"]["figures"] == {"value": 1.0}
    assert part.ran == ["bad one", "nan", "last"]


def test_what_there_is_no_time_for_is_reported_and_done_later(tmp_path):
    items = run_fake(FakePart(Item(key="short", seconds=1.0), Item(key="long", seconds=500.0)), tmp_path)
    assert items["short"]["status"] == "ok"
    assert items["long"]["status"] == "not reached"
    assert "it wants 500 s" in items["long"]["reason"]
    again = FakePart(Item(key="short", seconds=1.0), Item(key="long", seconds=500.0))
    items = run_fake(again, tmp_path, seconds=1000.0)
    assert items["long"]["status"] == "ok"
    assert again.ran == ["long"], "what is there is not measured again"


def test_a_part_without_items_does_not_stop_the_others(tmp_path):
    part = FakePart()
    part.items = lambda settings: 1 / 0
    items = run_fake(part, tmp_path)
    assert "ZeroDivisionError" in items["(the list of items)"]["reason"]


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setattr(runner.Worker, "module", "tests.benchmarks.lane_worker_double")


@pytest.mark.usefixtures("double")
def test_a_crash_or_a_hang_costs_one_item(tmp_path):
    keys = ("first", "second", "crash", "error", "third", "hang", "fourth")
    part = FakePart(*(Item(key=key, seconds=0.0, limit=20.0 if key != "hang" else 2.0) for key in keys))
    items = run_fake(part, tmp_path, isolate=True)
    status = {key: entry["status"] for key, entry in items.items()}
    assert [key for key in keys if status[key] == "ok"] == ["first", "second", "third", "fourth"]
    assert items["crash"]["reason"] == "the process ended (exit status 17) in stage 'warm-up'"
    assert items["crash"]["log"] == ["a library's last words"]
    assert items["crash"]["figures"]["first_step_s"] == 1.5, "what was measured before it died"
    assert items["hang"]["reason"] == "stopped after 2 s in stage 'warm-up'"
    pid = {key: entry["figures"].get("pid") for key, entry in items.items()}
    assert pid["first"] == pid["second"] != pid["third"]
    assert items["error"]["reason"] == "ValueError: no"


@pytest.mark.usefixtures("double")
def test_fresh_items_have_a_process_each_and_memory_halves_the_batch_for_all(tmp_path):
    part = FakePart(*(Item(key=key, seconds=0.0, limit=10.0, fresh=True) for key in ("large", "one", "two")))
    items = run_fake(part, tmp_path, Settings(batch=4), isolate=True)
    assert {key: entry["figures"]["batch"] for key, entry in items.items()} == {"large": 2, "one": 2, "two": 2}
    assert len({entry["figures"]["pid"] for entry in items.values()}) == 3


def results_of(items, smoke=False, device="NVIDIA H200"):
    run = {**RUN, "smoke": smoke, "machine": {"device": device}}
    return {"schema": 1, "runs": [run], "parts": {"fake": {"seconds": 1.0, "settings": {}, "items": items}}}


def test_merge_keeps_the_best_entry_and_every_run():
    first = results_of({"a": {"status": "ok", "figures": 1}, "b": {"status": "failed", "reason": "x"}})
    second = results_of({"a": {"status": "not reached"}, "b": {"status": "ok", "figures": 2}, "c": {"status": "ok"}})
    merged = merge([first, second])
    assert merged["parts"]["fake"]["items"]["a"]["figures"] == 1
    assert merged["parts"]["fake"]["items"]["b"]["figures"] == 2
    assert list(merged["parts"]["fake"]["items"]) == ["a", "b", "c"]
    assert merged["parts"]["fake"]["seconds"] == 2.0
    assert len(merged["runs"]) == 2


@pytest.mark.parametrize("other", [{"smoke": True}, {"device": "NVIDIA H100"}])
def test_merge_refuses_what_does_not_belong_together(other, tmp_path, capsys):
    with pytest.raises(ValueError, match="different devices or kinds do not merge"):
        merge([results_of({}), results_of({}, **other)])
    for name, found in (("a", results_of({})), ("b", results_of({}, **other))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(found))
    assert main(["--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 2
    assert "do not merge" in capsys.readouterr().err


def test_merge_by_command_writes_the_report(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results_of({name: {"status": "ok", "figures": {}}})))
    assert main(["--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 0
    items = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]["fake"]["items"]
    assert set(items) == {"a", "b"}
    assert "## Targets" in (tmp_path / "out" / "report.md").read_text()


def linear_entry(m, k, n, **ms):
    runs = {name.replace("_", " "): {"status": "ok", "ms": value, "loop_ms": 2 * value} for name, value in ms.items()}
    return {"status": "ok", "figures": {"m": m, "k": k, "n": n, "runs": runs}}


def step(ms, linear=None, shapes=None, share=0.0):
    found = {"ms": ms, "linear": linear, "fp8_shapes": shapes or {}, "fp8_share": share, "tokens": 8192}
    return {"status": "ok", "figures": found}


@pytest.fixture
def measured():
    data = results_of({})
    peaks = {"status": "ok", "figures": {"tflops": {"fp8 tensorwise": 1000.0}}}
    rows = [
        linear_entry(8192, 8192, 8192, bf16=10.0, torchao_tensorwise=6.0, te_delayed=5.0),
        linear_entry(8192, 4096, 4096, bf16=4.0, torchao_tensorwise=3.0),
    ]
    data["parts"]["linear"] = {"seconds": 1, "items": {"peaks": peaks, "8192": rows[0], "4096": rows[1]}}
    shapes = {"8192x8192": 2, "4096x4096": 4}
    data["parts"]["step8b"] = {"seconds": 1, "items": {
        BASELINE: step(100.0), "lightning bf16-true, compiled": step(95.0),
        MAIN: step(90.0, "torchao tensorwise", shapes, share=0.8),
        "torchao tensorwise, compiled": step(89.5, "torchao tensorwise", shapes),
    }}  # fmt: skip
    data["parts"]["overhead"] = {"seconds": 1, "items": {
        "fabric": {"status": "ok", "figures": {"added_ms": 0.1}},
        "trainer": {"status": "ok", "figures": {"added_ms": 0.4}},
    }}  # fmt: skip
    data["parts"]["optimizer"] = {"seconds": 1, "items": {
        "calls": {"status": "ok", "figures": {"calls": {}}},
        "stochastic, fused": {"status": "ok", "figures": {"ratio": 1.2}},
        "stochastic, foreach": {"status": "ok", "figures": {"ratio": 1.1}},
        "stochastic, bf16 moments, foreach": {"status": "ok", "figures": {"ratio": 1.15}},
        "fp32, fused": {"status": "failed", "reason": "x"},
    }}  # fmt: skip
    return data


def test_bounds_and_targets_by_hand(measured):
    rows = figures.linear_rows(measured)
    ours = measured["parts"]["step8b"]["items"][MAIN]["figures"]
    saved = 2 * (10 - 6) + 4 * (4 - 3)
    assert figures.amdahl_by_time(ours, 100.0, rows) == pytest.approx(100 / (100 - saved))
    faster = (2 * 6 + 4 * 3) / (2 * 10 + 4 * 4)
    assert figures.amdahl_by_flops(ours, rows) == pytest.approx(1 / (0.2 + 0.8 * faster))
    assert figures.of_limit(rows[8192, 8192, 8192], 1000.0)["bf16"] == pytest.approx(6 * 8192**3 / 1e15 / 0.01)
    found = {target["target"]: target for target in figures.targets(measured)}
    over_best = found["8B stack: fp8-tensorwise over Lightning's best bf16"]
    assert (over_best["measured"], over_best["met"]) == (pytest.approx(95 / 90), False)
    share = found["8B stack: share of the Amdahl bound over bf16-mixed, compiled"]
    assert (share["measured"], share["met"]) == (pytest.approx((100 / 90) / (100 / 88)), True)
    assert found["8B stack: over raw torchao + compile"]["measured"] == pytest.approx(89.5 / 90)
    assert found["8B stack: over raw TE"]["met"] is None
    large = found["linears of the 8192 class, the slowest of them, by its best recipe"]
    assert (large["measured"], large["met"]) == (2.0, True)
    assert found["host time per step that our plugin or strategy adds, ms"]["met"] is False
    assert found["min_gain='auto' over bf16-mixed, compiled, the worst model"]["met"] is None


def test_the_optimizer_is_judged_by_its_worse_implementation(measured):
    found = {t["target"].split(", to plain")[0]: t for t in figures.targets(measured) if "optimizer" in t["target"]}
    verdict = {name.removeprefix("optimizer step, "): (t["measured"], t["met"]) for name, t in found.items()}
    assert verdict == {
        "fp32": (None, None), "remainder": (None, None), "stochastic": (1.2, False),
        "stochastic, bf16 moments": (1.15, True),
    }  # fmt: skip


def test_the_optimizer_part_has_the_tensors_of_llama_1b():
    """Llama-3.2-1B: 16 blocks of 7 matrices and 2 norms, a tied embedding, a norm."""
    with torch.device("meta"):
        parameters = list(models.Llama(models.SHAPES["1b"]).parameters())
    assert len(parameters) == 16 * 9 + 2
    assert sum(p.numel() for p in parameters) == 1_235_814_400


def test_a_bound_needs_every_shape(measured):
    rows = figures.linear_rows(measured)
    ours = {**measured["parts"]["step8b"]["items"][MAIN]["figures"], "fp8_shapes": {"8192x1024": 1}}
    assert figures.amdahl_by_time(ours, 100.0, rows) is None
    assert figures.amdahl_by_flops({**ours, "fp8_shapes": {}}, rows) is None


@pytest.mark.parametrize("name", list(models.SHAPES))
def test_parameters_are_counted_right(name):
    shape = models.SHAPES[name]
    assert sum(p.numel() for p in models.build(shape, torch.device("meta")).parameters()) == shape.parameters


def test_the_8b_stack_fits_an_h200_with_float32_weights_and_adamw():
    gpu = 139 * 2**30
    assert 4.5e9 < models.SHAPES["8b"].parameters < 4.6e9
    assert models.peak_bytes(models.SHAPES["8b"], 2) < 0.8 * gpu < models.peak_bytes(models.SHAPES["8b"], 4)
    assert models.fitting_batch(models.SHAPES["8b"], gpu) == 2
    assert models.fitting_batch(models.SHAPES["1b"], gpu) == 4
    assert models.fitting_batch(models.SHAPES["8b"], 10 * 2**30) == 1


def test_the_estimate_of_memory_is_from_above():
    """Against autograd's saved tensors of a real step in bf16-mixed."""
    shape = models.Shape(name="t", layers=3, hidden=128, ffn=448, heads=4, kv_heads=2, vocab=64, sequence=64)
    running = setups.lightning(
        Job(shape=shape, device=torch.device("cpu"), compile=False), precision="bf16-mixed", compiled=False
    )
    batch = models.batches(shape, 2, torch.device("cpu"), count=1)
    running.step(batch)
    activations = bytes_held.by_storage(running, batch[0])["activations"]
    estimated = models.peak_bytes(shape, 2) - 12 * shape.parameters
    assert 0.5 * estimated < activations <= 1.15 * estimated


def test_contenders_are_timed_in_turn_and_one_that_fails_drops_out():
    order = []

    def bad():
        order.append("bad")
        raise RuntimeError("broken")

    samples, failed = measure.in_turn(
        {"a": lambda: order.append("a"), "bad": bad, "b": lambda: order.append("b")}, torch.device("cpu"), 2
    )
    assert order == ["a", "bad", "b", "a", "b"]
    assert failed == {"bad": "RuntimeError: broken"}
    assert [len(samples[name]) for name in ("a", "b")] == [2, 2]
    assert measure.rounds_within(10.0, 1.0, 5, 50) == 50
    assert measure.rounds_within(1000.0, 1.0, 5, 50) == 5


def test_a_broken_library_is_told_from_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "lane_broken.py").write_text("raise OSError('undefined symbol: foo')")
    (tmp_path / "lane_halved.py").write_text("import lane_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_library(("json", "lane_absent.sub")) == "lane_absent.sub is not installed"
    assert missing_library(("lane_broken",)) == "lane_broken does not import: OSError: undefined symbol: foo"
    assert missing_library(("lane_halved",)).startswith("lane_halved does not import: No module named")
    assert missing_library(("json",)) is None


def test_pytest_output_is_read_even_if_it_was_cut_short():
    text = (
        "tests/gpu/test_a.py::test_x[a b] PASSED [ 10%]\ntests/gpu/test_a.py::test_y FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (no) [ 30%]\n"
        "FAILED tests/gpu/test_a.py::test_y - AssertionError: 1 == 2\n"
    )
    found = parse(text, 1)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["reasons"] == {"tests/gpu/test_a.py::test_y": "AssertionError: 1 == 2"}
    assert parse(text, None)["headline"].endswith("stopped at the time limit")


def test_json_is_plain():
    assert clean({1: (float("inf"), torch.float8_e4m3fn, True, None)}) == {
        "1": ["inf", "torch.float8_e4m3fn", True, None]
    }
