"""The GPU lane runs from its command line to its report.

`make rehearse` runs this test, and every part; tests/benchmarks does so on a CPU, in `make test-more`.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rehearsed


def test_parts_of_the_gpu_lane_run_to_their_end(tmp_path):
    """Two of the parts, which share everything with the others: processes, time limits, results, report."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_lane",
        "--part",
        "linear",
        "loss",
        "--smoke",
        "--only",
        "peaks",
        "bf16-mixed",
        "fp8-hybrid",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert set(parts) == {"linear", "loss"}
    for part in parts.values():
        assert part["items"]
        assert {item["status"] for item in part["items"].values()} == {"ok"}
    assert (tmp_path / "report.md").exists()
