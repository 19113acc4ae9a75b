"""``python -m benchmarks.gpu``: its predictions and its table; tests/ledger/test_gpu_script.py runs it."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.ledger import roofline
from benchmarks.rivals import contenders, models

pytestmark = pytest.mark.slow

STACK = models.SHAPES["8b"]
BASE = {"contender": contenders.BASELINE, "ms": 400.0, "peak_bytes": 95.8e9, "losses": [11.8, 7.25]}
MAIN = {"contender": contenders.MAIN, "ms": 320.0, "peak_bytes": 81.9e9, "losses": [11.8, 7.26]}


@pytest.mark.parametrize(("layers", "device"), [(16, "NVIDIA H200"), (8, "NVIDIA H100 80GB HBM3")])
def test_every_contender_has_a_prediction_at_both_sizes(layers, device):
    found = gpu.predictions(replace(STACK, layers=layers), device)
    assert set(found) == set(gpu.CONTENDERS)
    memory = (80 if layers == 8 else 141) * 1e9
    assert all(0 < row["peak_bytes"] < memory for row in found.values())


def test_a_size_that_nobody_counted_has_no_prediction():
    assert gpu.predictions(replace(STACK, layers=3), "NVIDIA H200") == {}


def test_predictions_for_an_h200_are_the_ledgers():
    entry = next(entry for entry in gpu.counted() if entry.contender == contenders.MAIN and entry.blocks == 16)
    found = gpu.predictions(STACK, "NVIDIA H200")[contenders.MAIN]
    assert found == {"ms": roofline.predict(entry, roofline.assumed()).total, "peak_bytes": entry.peak}


def test_an_h100_moves_bytes_more_slowly_and_multiplies_as_fast():
    h100, h200 = gpu.rates_of("NVIDIA H100 80GB HBM3").values, gpu.rates_of("NVIDIA H200").values
    assert h100["bandwidth"] / h200["bandwidth"] == pytest.approx(3.35 / 4.8)
    assert {**h100, "bandwidth": 0} == {**h200, "bandwidth": 0}


def test_the_table_has_the_prediction_beside_each_figure():
    predicted = {
        contenders.BASELINE: {"ms": 392.0, "peak_bytes": 95.8e9},
        contenders.MAIN: {"ms": 307.0, "peak_bytes": 81.9e9},
    }
    failed = {"contender": gpu.EIGHT_BITS, "failed": "status 1: RuntimeError: no"}
    lines = gpu.table([BASE, MAIN, failed], predicted).splitlines()
    assert lines[2] == f"| {contenders.BASELINE} | 400.0 | 392.0 | 1.00 | 1.00 | 95.8 | 95.8 | 7.2500 |"
    assert lines[3] == f"| {contenders.MAIN} | 320.0 | 307.0 | 1.25 | 1.28 | 81.9 | 81.9 | 7.2600 |"
    assert lines[-1] == f"{gpu.EIGHT_BITS} failed: status 1: RuntimeError: no"
    without = gpu.table([MAIN], {}).splitlines()
    assert without[2] == f"| {contenders.MAIN} | 320.0 | - | - | - | 81.9 | - | 7.2600 |"


def test_a_contender_that_fails_is_a_line_of_the_results(monkeypatch):
    """The child process finds no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu.in_a_process(contenders.MAIN, 1, 1)
    assert found == {"contender": contenders.MAIN, "failed": found["failed"]}
    assert "needs a CUDA GPU" in found["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "needs a CUDA GPU with FP8, such as an H100" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", list(models.SHAPES))
def test_parameters_are_counted_right(name):
    shape = models.SHAPES[name]
    assert sum(p.numel() for p in models.build(shape, torch.device("meta")).parameters()) == shape.parameters


def test_the_stack_fits_the_device_with_float32_weights_and_adamw():
    """An H200 holds two sequences of 16 layers, an H100 of 80 GB two of 8: one of 16 would not fit."""
    h200, h100 = 139 * 2**30, 79 * 2**30
    assert models.fitting(STACK, h200, (gpu.BATCH,)) == (STACK, 2)
    assert models.peak_bytes(STACK, 1) > h100
    assert models.fitting(STACK, h100, (gpu.BATCH,)) == (replace(STACK, layers=8), 2)
