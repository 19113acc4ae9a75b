"""What the commands and the example say where Transformer Engine is installed and there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command, code=0):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == code, result.stderr[-2000:]
    return result.stdout + result.stderr


def test_fits_simulates_with_the_cuda_build_of_torch_and_without_a_driver():
    """Here torch is CUDA's build, and no null GPU."""
    model = "lightning_lowprec.tools.demo.ByteGPT"
    options = ("--fits", "H200", "--seq", "32", "--batch", "2", "--precisions", "bf16-mixed,bf16-8bit")
    said = run("-m", "lightning_lowprec.tools.cli", "plan", model, *options)
    assert "not simulated" not in said
    assert "Traceback" not in said
    assert sum("  yes  " in line for line in said.splitlines()) == 2
