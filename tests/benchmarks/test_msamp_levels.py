"""The levels stay within 1.5 % of float32's loss (60 steps of a small GPT), in the bytes they promise."""

import json
import math

import pytest

from benchmarks import msamp_levels
from benchmarks.msamp_levels import FP32, TOLERANCE, differences, main, train

SMALL = {"depth": 2, "width": 64, "block_size": 64}
BYTES = {  # weight + gradient + master + moments
    "adamw": {FP32: 4 + 4 + 8, "O1": 2 + 1 + 8, "O2": 2 + 1 + (1 + 2), "O3": 1 + 1 + 2 + (1 + 2)},
    "sgd": {FP32: 4 + 4 + 4, "O2": 2 + 1 + 2},
}


@pytest.fixture(scope="module", params=BYTES)
def runs(request):
    return request.param, {level: train(level, 0, 60, request.param, **SMALL) for level in BYTES[request.param]}


def test_losses_are_those_of_float32(runs):
    losses = {level: run["val_loss"] for level, run in runs[1].items()}
    assert losses[FP32] < 0.75 * math.log(256)  # it has learned something
    for level, loss in losses.items():
        assert loss == pytest.approx(losses[FP32], rel=TOLERANCE), level
        assert level == FP32 or loss != losses[FP32]  # the levels are not float32 under another name
    if "O3" in losses:  # both multiply by the same float16 weights, rounded to e4m3: O2 in the GEMM, O3 in the step
        assert losses["O3"] == losses["O2"]


def test_bytes_per_weight(runs):
    optimizer, found = runs
    for level, allowed in BYTES[optimizer].items():
        assert found[level]["bytes_per_weight"] == pytest.approx(allowed, abs=0.02), level


def test_the_difference_is_that_of_the_means_over_common_seeds():
    runs = {
        FP32: {"0": {"val_loss": 2.0}, "1": {"val_loss": 4.0}, "2": {"val_loss": 100.0}},
        "O1": {"0": {"val_loss": 2.3}, "1": {"val_loss": 4.0}},
        "O2": {"3": {"val_loss": 1.0}},
    }
    assert differences(runs) == {"O1": pytest.approx(0.05)}


def test_a_run_goes_on_from_its_file_and_says_whether_the_losses_agree(tmp_path, monkeypatch, capsys):
    done = []

    def trained(level, seed, steps, optimizer):
        done.append((level, seed, steps, optimizer))
        return {"val_loss": 2.0 if level == FP32 else 2.02, "bytes_per_weight": 6.0}

    monkeypatch.setattr(msamp_levels, "train", trained)
    out = tmp_path / "new" / "levels.json"
    command = ["--steps", "3", "--levels", "fp32", "O2", "--out", str(out), "--seeds"]
    assert main([*command, "0"]) == 0
    assert main([*command, "0", "1"]) == 0
    assert done == [("fp32", 0, 3, "adamw"), ("O2", 0, 3, "adamw"), ("fp32", 1, 3, "adamw"), ("O2", 1, 3, "adamw")]
    written = json.loads(out.read_text())
    assert written["device"] == "CPU, emulated FP8"
    assert written["optimizers"]["adamw"]["runs"]["O2"]["1"] == {"val_loss": 2.02, "bytes_per_weight": 6.0}
    assert "+1.00%" in capsys.readouterr().out
    written["optimizers"]["adamw"]["runs"]["O2"]["1"]["val_loss"] = 2.2  # mean 2.11: 5.5 % off
    out.write_text(json.dumps(written))
    assert main([*command, "0", "1"]) == 1
    with pytest.raises(SystemExit):
        main(["--steps", "4", "--out", str(out)])
    assert "has runs of 3 steps, not 4" in capsys.readouterr().err
