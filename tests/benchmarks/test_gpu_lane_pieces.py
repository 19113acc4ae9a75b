"""The pieces of the GPU lane: what goes on after a failure, merging, arithmetic by hand, models."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_lane import bytes_held, measure, models, runner, setups
from benchmarks.gpu_lane.__main__ import main
from benchmarks.gpu_lane.item import Item, missing_library
from benchmarks.gpu_lane.part_linear import shapes
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


def test_a_second_call_keeps_the_batch_and_tries_what_failed_last(tmp_path):
    """So that an item that is too large by itself does not shrink the others, or use up their time again."""

    class Batched(FakePart):
        def run(self, key, settings):
            return super().run(key, settings) | {"batch": settings.batch}

    keys = ("good", "bad", "late")
    run_fake(
        Batched(*(Item(key=key, seconds=99.0 if key == "late" else 0.0) for key in keys)), tmp_path, Settings(batch=2)
    )
    again = Batched(*(Item(key=key) for key in keys))
    items = run_fake(again, tmp_path)
    assert again.ran == ["late", "bad"]
    assert items["late"]["figures"]["batch"] == 2


@pytest.mark.usefixtures("double")
def test_memory_in_a_second_call_leaves_the_batch_alone(tmp_path):
    """``large`` fails with a batch of 4; what is measured already had 4."""
    run_fake(FakePart(Item(key="one", seconds=0.0, fresh=True)), tmp_path, Settings(batch=4), isolate=True)
    part = FakePart(*(Item(key=key, seconds=0.0, limit=10.0, fresh=True) for key in ("large", "two")))
    items = run_fake(part, tmp_path, isolate=True)
    assert items["large"]["status"] == "failed"
    assert items["two"]["figures"]["batch"] == 4


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


@pytest.mark.parametrize(
    ("device", "name"), [("NVIDIA H200", "h200-2030-01-02"), ("NVIDIA H100 80GB HBM3", "h100-2030-01-02")]
)
def test_committed_results_are_named_by_device_and_date(device, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu_lane.machine.ROOT", tmp_path)
    for folder, smoke in (("some", False), ("toy", True)):
        (tmp_path / folder).mkdir()
        found = results_of({"a": {"status": "ok", "figures": {}}}, smoke=smoke, device=device)
        (tmp_path / folder / "results.json").write_text(json.dumps(found))
    assert main(["--merge", str(tmp_path / "some")]) == 0
    assert (tmp_path / "benchmarks" / "results" / name / "results.json").exists()
    assert main(["--merge", str(tmp_path / "toy")]) == 2
    assert "mean nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--part", "linear"])


@pytest.mark.parametrize("name", list(models.SHAPES))
def test_parameters_are_counted_right(name):
    shape = models.SHAPES[name]
    assert sum(p.numel() for p in models.build(shape, torch.device("meta")).parameters()) == shape.parameters


def test_the_stack_fits_the_device_with_float32_weights_and_adamw(monkeypatch):
    """An H200 holds two sequences of 16 layers, an H100 of 80 GB two of 8: one of 16 would not fit."""
    h200, h100 = 139 * 2**30, 79 * 2**30
    stack, batches = models.SHAPES["8b"], models.BATCHES
    assert 4.5e9 < stack.parameters < 4.6e9
    assert models.peak_bytes(stack, 2) < 0.8 * h200 < models.peak_bytes(stack, 4)
    assert models.fitting(stack, h200, batches) == (stack, 2)
    assert models.fitting(models.SHAPES["1b"], h200, batches) == (models.SHAPES["1b"], 4)
    assert models.peak_bytes(stack, 1) > h100
    half, batch = models.fitting(stack, h100, batches)
    assert (half.layers, half.hidden, batch) == (8, stack.hidden, 2)
    assert models.fitting(stack, 10 * 2**30, batches) == (half, 1)
    memory = SimpleNamespace(total_memory=h100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert models.step_size(Settings(device="cuda")) == (half, 2)
    assert models.step_size(Settings(device="cuda", batch=1)) == (half, 1)
    assert models.step_size(Settings(smoke=True)) == (models.TOY, 2)


@pytest.mark.parametrize("batch", [None, 1])
def test_the_linear_table_has_every_shape_of_the_steps(batch):
    """Llama's linears as they are in the models themselves, at the tokens of their steps: no bound without them."""
    settings = Settings(batch=batch)
    listed = shapes(settings)
    assert len(listed) == len(set(listed))
    shape, fitting = models.step_size(settings)
    with torch.device("meta"):
        model = models.Llama(shape)
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    wanted = {(fitting * 4096, m.in_features, m.out_features) for fqn, m in linears.items() if fqn != setups.HEAD}
    assert len(wanted) == 4
    assert wanted <= set(listed[:9]), "the first, so that they are reached"
    assert {(8192, 8192, 8192), (8192, 8192, 28672)} <= set(listed[:9]), "the 8192 class"
    seventy = {(8192, 28672, 8192), (8192, 8192, 1024)}
    assert seventy <= set(listed)
    assert min(min(row) for row in listed) <= 1024, "small ones"


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


def test_json_is_plain():
    assert clean({1: (float("inf"), torch.float8_e4m3fn, True, None)}) == {
        "1": ["inf", "torch.float8_e4m3fn", True, None]
    }
