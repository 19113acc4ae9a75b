"""The GPU lane at toy size on CPU: everything runs, fails and merges as it will, unseen, on a GPU machine."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_lane import figures, part_loss, report, targets
from benchmarks.gpu_lane.__main__ import main
from benchmarks.gpu_lane.contenders import (
    BASELINE,
    BETWEEN_BF16,
    BF16_WEIGHTS,
    CHUNKED,
    EIGHT_BITS,
    FAST_BACKWARD,
    FP8_HEAD,
    MAIN,
    REMAINDER,
    SHARDED,
    TE_COMPILED,
    WITH_MASTERS,
)
from benchmarks.gpu_lane.part_linear import TOY_SHAPES
from benchmarks.gpu_lane.rates import measured_rates
from lightning_lowprec.conversion.name_suffixes import MASTERS, split
from lightning_lowprec.names import TABLE
from tests.once import once

ROOT = Path(__file__).parents[2]
PARTS = ["step8b", "linear", "loss", "memory"]
WITHOUT_TE = "import sys; sys.modules['transformer_engine'] = None; from benchmarks.gpu_lane.__main__ import main;"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All parts in one process in which Transformer Engine is not installed."""
    folder = tmp_path_factory.mktemp("lane")
    with once(folder, "lane-of-all") as (shared, missing):
        if missing:
            argv = ["--smoke", "--out", str(shared), "--date", "2030-01-02"]
            done = subprocess.run(
                [sys.executable, "-c", f"{WITHOUT_TE} sys.exit(main({argv!r}))"],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "LOWPREC_COMMIT": "abc123"},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
            (shared / "said.txt").write_text(done.stdout)
        return shutil.copytree(shared, folder / "out")


@pytest.fixture(scope="module")
def data(out):
    return json.loads((out / "results.json").read_text())


def ok(data, part):
    return {key: e["figures"] for key, e in data["parts"][part]["items"].items() if e["status"] == "ok"}


def test_every_part_ran_and_nothing_failed(data):
    assert list(data["parts"]) == PARTS
    failed = {
        (part, key): entry.get("reason")
        for part, found in data["parts"].items()
        for key, entry in found["items"].items()
        if entry["status"] not in ("ok", "missing")
    }
    assert failed == {}
    assert all(found["seconds"] > 0 and found["settings"]["smoke"] for found in data["parts"].values())


def test_the_origin_is_written(data):
    (run,) = data["runs"]
    assert (run["date"], run["commit"], run["smoke"]) == ("2030-01-02", "abc123", True)
    assert run["machine"]["device"] == "cpu"
    assert run["machine"]["versions"]["torch"]
    assert {"torchao", "lightning", "transformer-engine", "triton"} <= run["machine"]["versions"].keys()


def test_a_missing_library_is_reported_with_the_reason(data, out):
    for part in ("step8b", "memory"):
        reasons = [e["reason"] for key, e in data["parts"][part]["items"].items() if "te delayed" in key]
        assert reasons
        assert set(reasons) == {"transformer_engine.pytorch is not installed"}
    runs = ok(data, "linear")["32x64x128"]["runs"]
    assert runs["te block"] == {"status": "missing", "reason": "transformer_engine.pytorch is not installed"}
    assert "transformer_engine.pytorch is not installed" in (out / "report.md").read_text()


def test_every_name_of_ours_is_there(data):
    items = data["parts"]["step8b"]["items"]
    shown = [
        name for name in TABLE if name in WITH_MASTERS or not (split(name)[1] in MASTERS and split(name)[0] in TABLE)
    ]
    identities = {f"{TABLE[name].plugin.__name__} {sorted(TABLE[name].options.items())}" for name in shown}
    assert {f"ours {name}" for name in WITH_MASTERS} <= set(items)
    ours = [key for key in items if key.startswith("ours ")]
    with_losses = [f"{key}, {CHUNKED}" for key in (MAIN, REMAINDER)]
    with_losses += [f"{key}, {FP8_HEAD}" for key in (MAIN, BF16_WEIGHTS, REMAINDER, EIGHT_BITS, FAST_BACKWARD)]
    with_losses += [f"{MAIN}, {BETWEEN_BF16}"]
    more = [BF16_WEIGHTS, SHARDED, TE_COMPILED, targets.BY_GAIN, *with_losses]
    assert len(ours) == len(identities) + len(more), "one per distinct plugin, and those with options"
    assert set(more) <= set(ours)


def test_linear_ratios_follow_from_the_raw_figures(data, out):
    rows = ok(data, "linear")
    gains = json.loads((out / "gains.json").read_text())
    for m, k, n in TOY_SHAPES:
        row = rows[f"{m}x{k}x{n}"]
        runs = {name: run for name, run in row["runs"].items() if run["status"] == "ok"}
        assert {"bf16", "torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp"} <= runs.keys()
        assert {"bf16, float32 weights", "torchao tensorwise, float32 weights"} <= runs.keys()
        for name, run in runs.items():
            assert run["ms"] == pytest.approx(statistics.median(run["samples"]), abs=1e-4)
            assert 0 < run["min"] <= run["ms"] <= run["max"] < 10_000
            base = "bf16, float32 weights" if name.endswith("float32 weights") else "bf16"
            assert figures.ratios(row)[name] == pytest.approx(runs[base]["ms"] / run["ms"])
        (gain,) = (g for g in gains if (g["tokens"], g["in_features"], g["recipe"]) == (m, k, "rowwise"))
        assert gain["out_features"] == n
        assert (gain["device"], gain["backend"]) == ("cpu", "torchao")
        assert gain["ratio"] == pytest.approx(runs["bf16"]["ms"] / runs["torchao rowwise"]["ms"], abs=1e-3)


def test_named_rates_are_read_from_the_results(data, out):
    """The toy block: 64 tokens of width 64, 128 inside of the MLP, 32 for keys and values."""
    found = measured_rates(out / "results.json")
    peaks = ok(data, "linear")["peaks"]
    assert found == peaks["rates"]
    assert peaks["rates_failed"] == {}
    assert all(rate > 0 for rate in found.values())
    forward = {"64x128x64", "64x64x128", "64x64x64", "64x32x64"}
    for kind in ("bf16", "fp8 fast", "fp8 exact", "fp8 rowwise exact"):
        assert {f"gemm {kind} {size}" for size in forward} <= found.keys()
    for kind in ("bf16", "fp8 exact", "fp8 rowwise exact"):  # of gate and up, and of keys and values
        assert {f"gemm {kind} dgrad 64x64x128", f"gemm {kind} wgrad 128x64x64"} <= found.keys()
        assert {f"gemm {kind} dgrad 64x64x32", f"gemm {kind} wgrad 32x64x64"} <= found.keys()
    assert {"bandwidth copy", "gemm fp8 exact 64x128x64 sustained", "attention backward 2x4x2x32x16"} <= found.keys()
    assert "gemm fp8 exact dgrad 64x64x128" in (out / "report.md").read_text()


def test_steps_train_the_same_model_on_the_same_data(data):
    steps = ok(data, "step8b")
    assert {BASELINE, MAIN, SHARDED, "torchao tensorwise, compiled", "accelerate torchao, compiled"} <= steps.keys()
    for step in steps.values():
        assert step["tokens"] == step["batch"] * 32
        assert len(step["losses"]) == step["steps"] == 6
        assert step["ms"] == pytest.approx(statistics.median(step["samples"]), abs=1e-4)
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["ms"] * 1e3)
        assert step["losses"][0] == pytest.approx(steps[BASELINE]["losses"][0], abs=0.01)
        assert step["losses"][-1] < step["losses"][0]
        assert step["attention"] == "FLASH_ATTENTION", "what torch has on a CPU"
        assert step["profile"] == {}, "there is no GPU"
    weights = {name: step["weights"] for name, step in steps.items()}
    assert weights[MAIN] == weights[BASELINE] == "float32"
    assert weights[BF16_WEIGHTS] == weights["lightning bf16-true"] == "bfloat16"


def test_the_share_of_fp8_is_counted(data):
    steps = ok(data, "step8b")
    shape = {"hidden": 64, "ffn": 128, "kv": 32, "vocab": 256, "layers": 2, "sequence": 32}
    block = 2 * 64 * (64 + shape["kv"]) + 3 * 64 * shape["ffn"]
    fp8, head, attention = 6 * 2 * block, 6 * 64 * 256, 6 * 32 * 64 * 2
    assert steps[MAIN]["fp8_share"] == pytest.approx(fp8 / (fp8 + head + attention))
    assert steps[MAIN]["matrix_flops_per_token"] == fp8 + head + attention
    assert steps[MAIN]["fp8_shapes"] == {"64x64": 4, "64x32": 4, "64x128": 4, "128x64": 2}
    assert steps[MAIN]["fp8_layers"] == steps[SHARDED]["fp8_layers"] == steps[BF16_WEIGHTS]["fp8_layers"] == 14
    assert steps["accelerate torchao, compiled"]["fp8_layers"] == 13, "it keeps the first Linear too"
    assert steps[BASELINE]["fp8_share"] == 0
    assert steps["ours fp8-hybrid, min_gain=auto"]["fp8_layers"] == 0


def test_memory_is_in_bytes_per_parameter(data):
    found = ok(data, "memory")
    expected = {
        "lightning 32-true + AdamW": (4, 4, 8),
        "lightning bf16-mixed + AdamW": (4, 4, 8),
        "lightning bf16-true + AdamW": (2, 2, 4),
        f"{MAIN} + AdamW": (4, 4, 8),
        f"{BF16_WEIGHTS} + AdamW": (2, 2, 4),
        f"{SHARDED} + AdamW": (4, 4, 8),
    }
    for key, sizes in expected.items():
        row = found[key]["bytes_per_parameter"]
        assert (row["weights"], row["gradients"]) == sizes[:2]
        assert row["optimizer"] == pytest.approx(sizes[2], abs=0.01)
        assert found[key]["state_bytes_per_parameter"] == pytest.approx(sum(sizes), abs=0.01)
    masters = {"bf16-master": 4, "fp16-master": 4, "bf16-remainder": 2, "bf16-sr": 0}
    for name, size in masters.items():
        if name in TABLE:
            assert found[f"ours {name} + AdamW"]["bytes_per_parameter"]["masters"] == pytest.approx(size, abs=0.01)
    linears, others = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 128), 2 * 256 * 64 + 5 * 64
    o3 = found["ours msamp-o3 + AdamW"]["bytes_per_parameter"]
    assert o3["masters"] == pytest.approx(2 * linears / (linears + others), abs=0.01), "fp16, of the FP8 weights"
    assert o3["optimizer"] == pytest.approx((3 * linears + 8 * others) / (linears + others), abs=0.01)
    eight_bit = found["lightning bf16-true + AdamW8bit"]["bytes_per_parameter"]["optimizer"]
    assert 2 <= eight_bit < 3
    activations = {key: row["activation_bytes_per_token"] for key, row in found.items()}
    assert activations["lightning bf16-true + AdamW"] < activations["lightning 32-true + AdamW"]


def test_losses_are_judged_by_the_engine_of_compare(data, out):
    found = {key: row["result"] for key, row in ok(data, "loss").items()}
    assert {f"{name}, seed 0" for name in ("bf16-mixed", "fp8-hybrid", "msamp-o2", "int8-mixed")} <= set(found)
    base = found["bf16-mixed, seed 0"]
    for run in found.values():
        assert len(run["train_losses"]) == 6
        assert run["train_losses"][0] == pytest.approx(base["train_losses"][0], abs=0.01), "the same weights and batch"
        assert run["val_losses"][-1] < math.log(256), "better than chance"
    compared = part_loss.comparison(data)
    assert [result.name for result in compared.results] == [key.rpartition(", seed ")[0] for key in found]
    section = (out / "report.md").read_text().split("## Losses")[1].split("\n## ")[0]
    for verdict, result in zip(compared.verdicts.values(), compared.results, strict=True):
        gap = result.final_val / base["val_losses"][-1] - 1
        assert f"{gap:+.2%}" in next(line for line in section.splitlines() if line.startswith(f"| {result.name} "))
        assert verdict.gap == pytest.approx(gap)


def test_seeds_are_compared_in_pairs(data):
    more = json.loads(json.dumps(data))
    items = more["parts"]["loss"]["items"]
    for key in ("bf16-mixed", "fp8-hybrid"):
        entry = json.loads(json.dumps(items[f"{key}, seed 0"]))
        entry["figures"]["result"] |= {"seed": 1, "val_losses": [5.0, 5.1 if key == "bf16-mixed" else 5.2]}
        items[f"{key}, seed 1"] = entry
    compared = part_loss.comparison(more)
    assert compared.spec.precisions == ("bf16-mixed", "fp8-hybrid"), "those that have every seed of the baseline"
    assert len(compared.verdicts["fp8-hybrid"].cost.gaps) == 2
    assert "not told apart" in part_loss.section(more)


def test_the_report_is_complete_and_pretends_nothing(data, out):
    text = (out / "report.md").read_text()
    for title in ("Machine", "Targets", "Linear layers", "Training steps, 8B", "Memory", "Losses"):
        assert f"## {title}" in text
    assert "could not be rendered" not in text
    assert "no figure here means anything" in text
    assert all(target["met"] is None for target in targets.targets(data)), "toy figures meet no target"
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {f"{name}.png" for name in ("linear", "steps", "memory", "loss")}
    assert len(list(out.iterdir())) <= 8, "more files do not come back from the GPU machine"


def test_a_call_ends_with_the_table_of_the_readme_and_the_pictures(out):
    said = (out / "said.txt").read_text().splitlines()
    assert any(line.startswith("|  | 8B-shaped stack of 2 layers, tokens/s | peak GB |") for line in said)
    assert [Path(line).name for line in said[-5:]] == ["report.md", "linear.png", "loss.png", "memory.png", "steps.png"]


def test_a_second_call_goes_on_and_keeps_what_is_there(data, out, capsys):
    assert main(["--part", "linear", "--smoke", "--out", str(out), "--only", "peaks"]) == 0
    after = json.loads((out / "results.json").read_text())
    assert after["parts"]["linear"]["items"] == data["parts"]["linear"]["items"]
    assert len(after["runs"]) == 2
    assert "[linear]" not in capsys.readouterr().out, "nothing was measured again"


def test_one_part_in_worker_processes(tmp_path):
    argv = ["--part", "linear", "--smoke", "--isolate", "--out", str(tmp_path), "--only", "peaks", "32x64x128"]
    assert main(argv) == 0
    items = json.loads((tmp_path / "results.json").read_text())["parts"]["linear"]["items"]
    assert {key: entry["status"] for key, entry in items.items()} == {"peaks": "ok", "32x64x128": "ok"}


def test_without_a_gpu_only_smoke_runs(tmp_path, capsys):
    assert main(["--part", "linear", "--device", "cpu", "--out", str(tmp_path / "none")]) == 2
    assert "only --smoke runs here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_section_of_unknown_figures_does_not_lose_the_others(data):
    broken = json.loads(json.dumps(data))
    broken["parts"]["memory"]["items"]["lightning 32-true + AdamW"]["figures"].pop("bytes_per_parameter")
    text = report.render(broken)
    assert text.count("could not be rendered") == 1
    assert "## Losses" in text
