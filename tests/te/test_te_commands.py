"""What the commands and the example say where Transformer Engine is installed and there is no GPU."""

import json
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


def test_doctor():
    facts = json.loads(run("-m", "lightning_lowprec.tools.cli", "doctor", "--json"))
    assert facts["backends"]["Transformer Engine"] == "imports"
    assert facts["versions"]["transformer-engine"] == "2.20.2"
    verdicts = {verdict["name"]: verdict for verdict in facts["precisions"]}
    for name in ("fp8-hybrid-te", "fp8-current-te", "fp8-block-te", "mxfp8-te", "nvfp4-te", "fp8-hybrid-te-fp16"):
        assert not verdicts[name]["runs"]
        assert "cpu is no NVIDIA GPU, and Transformer Engine computes on NVIDIA GPUs only [" in verdicts[name]["reason"]
    assert verdicts["fp8-hybrid"]["emulated"]  # torchao's


def test_fits_simulates_with_the_cuda_build_of_torch_and_without_a_driver():
    """Here torch is CUDA's build, and no null GPU."""
    model = "lightning_lowprec.tools.demo.ByteGPT"
    options = ("--fits", "H200", "--seq", "32", "--batch", "2", "--precisions", "bf16-mixed,bf16-8bit")
    said = run("-m", "lightning_lowprec.tools.cli", "plan", model, *options)
    assert "not simulated" not in said
    assert "Traceback" not in said
    assert sum("  yes  " in line for line in said.splitlines()) == 2


def test_the_example_is_refused_with_the_way_out(tmp_path):
    said = run(str(ROOT / "examples" / "te_llama.py"), "--steps=1", "--hidden=64", "--layers=1", code=1)
    assert "`precision='fp8-hybrid-te'` cannot run" in said
    assert "'fp8-hybrid' emulates FP8 on CPU" in said
