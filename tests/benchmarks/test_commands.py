"""The commands of benchmarks: what they print, predict and refuse."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import emulation, gpu
from benchmarks.ledger import __main__ as command
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


def test_the_table_has_the_prediction_beside_each_figure():
    predicted = {contenders.BASELINE: {"ms": 392.0, "peak_bytes": 95.8e9}}
    predicted[contenders.MAIN] = {"ms": 307.0, "peak_bytes": 81.9e9}
    failed = {"contender": gpu.EIGHT_BITS, "failed": "status 1: RuntimeError: no"}
    lines = gpu.table([BASE, MAIN, failed], predicted).splitlines()
    assert lines[2] == f"| {contenders.BASELINE} | 400.0 | 392.0 | 1.00 | 1.00 | 95.8 | 95.8 | 7.2500 |"
    assert lines[3] == f"| {contenders.MAIN} | 320.0 | 307.0 | 1.25 | 1.28 | 81.9 | 81.9 | 7.2600 |"
    assert lines[-1] == f"{gpu.EIGHT_BITS} failed: status 1: RuntimeError: no"
    without = gpu.table([MAIN], {}).splitlines()
    assert without[2] == f"| {contenders.MAIN} | 320.0 | - | - | - | 81.9 | - | 7.2600 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs_and_a_contender_that_fails_is_a_line_of_the_results(tmp_path, capsys):
    found = gpu.in_a_process(contenders.MAIN, 1, 1)
    assert found == {"contender": contenders.MAIN, "failed": found["failed"]}
    assert "needs a CUDA GPU" in found["failed"]
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "needs a CUDA GPU with FP8, such as an H100" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- the ledger

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")


@no_cuda
def test_a_torch_without_cuda_is_answered_with_what_to_install(capsys):
    assert command.main([]) == 1
    assert "`make ledger` sets up an environment with the CUDA build" in capsys.readouterr().err


@no_cuda
def test_the_null_gpu_says_which_headers_are_missing():
    run = [sys.executable, "-m", "benchmarks.ledger.launch", "true"]
    done = subprocess.run(run, text=True, capture_output=True)
    assert done.returncode == 1
    assert "nvidia-cuda-crt" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_contender_is_refused_with_the_list(monkeypatch, capsys):
    monkeypatch.setattr(command, "has_cuda_torch", lambda: True)
    assert command.main(["--contenders", "ours fp9"]) == 1
    said = "--contenders ['ours fp9'] are not valid; expected some of: lightning bf16-mixed, compiled"
    assert said in capsys.readouterr().err


# ---- the time of emulation, behind the figures of docs/what-runs-where.md


def test_it_prints_a_line_for_every_precision(capsys):
    emulation.main(repeats=1)
    rows = re.findall(r"^(\S+) +(\d+) ms of CPU time +([\d.]+) times 32-true$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in rows] == list(emulation.NAMES)
    assert rows[0][2] == "1.00"
