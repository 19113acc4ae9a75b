"""What our tools say about this machine, what FP8 costs in memory, and one process under NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.tools.doctor import availability
from tests.gpu.device import DEVICE, DRY, NO_VALUES, on_gpu_only
from tests.gpu.subjects import FP8_NAMES, Stack

ROOT = Path(__file__).parents[2]
MEBIBYTE = 2**20


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path(), **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def path():
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def test_doctor_says_how_it_runs_here():
    done = run("-m", "lightning_lowprec.tools.cli", "doctor", "--for", "fp8-hybrid", "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["runs"]
    assert verdict["emulated"] is DRY
    assert DRY or verdict["reason"].startswith("FP8 kernels of NVIDIA")


@on_gpu_only
@pytest.mark.parametrize("name", FP8_NAMES)
def test_nothing_is_emulated_here(name):
    verdict = availability(name, DEVICE)
    assert not verdict.emulated
    assert verdict.runs or verdict.reason


@on_gpu_only
def test_conversion_takes_no_memory():
    model = Stack(width=1024, depth=4).to(DEVICE)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(compile=False))
    before = torch.cuda.memory_allocated(DEVICE)
    fabric.setup_module(model)
    assert torch.cuda.memory_allocated(DEVICE) - before < MEBIBYTE


@on_gpu_only
@pytest.mark.parametrize("compile", [False, pytest.param("auto", marks=pytest.mark.rehearsed)])
def test_steps_do_not_leak(compile):
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(compile=compile))
    module = fabric.setup_module(Stack(width=512, depth=3))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-3))
    x = torch.randn(512, 512, device=DEVICE)
    held = []
    for _ in range(8):
        fabric.backward(module(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(DEVICE)
        held.append(torch.cuda.memory_allocated(DEVICE))
    assert held[-1] == held[3], held


@on_gpu_only
def test_evaluation_saves_nothing_for_backward():
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(compile=False))
    module = fabric.setup_module(Stack(width=512, depth=3))
    x = torch.randn(4096, 512, device=DEVICE)
    with torch.no_grad():
        module(x)
        before = torch.cuda.memory_allocated(DEVICE)
        out = module(x)
    assert torch.cuda.memory_allocated(DEVICE) - before <= out.numel() * 4 + MEBIBYTE


@pytest.mark.distributed
def test_one_process_under_ddp_trains_as_without():
    done = run("-m", "tests.gpu.ddp_script", MASTER_ADDR="127.0.0.1", MASTER_PORT="29763")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["backend"] == ("gloo" if DRY or NO_VALUES else "nccl")
    assert found["ddp"] == found["alone"] or NO_VALUES
    assert found["validated"] == pytest.approx(found["validated_alone"], rel=1e-6) or NO_VALUES
    assert found["compiled"] == pytest.approx(found["ddp"], rel=0.05) or NO_VALUES
    assert found["ddp"][-1] < found["ddp"][0] or NO_VALUES
