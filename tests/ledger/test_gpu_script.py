"""``python -m benchmarks.gpu`` runs from its command line to its table, with three blocks."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu


@pytest.mark.timeout(900)  # four processes, each of which compiles
def test_every_contender_runs_to_its_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--layers", "3", "--steps", "2", "--out", tmp_path / "gpu.json"]
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [run["contender"] for run in found["runs"]] == list(gpu.CONTENDERS)
    assert {len(run["step_ms"]) for run in found["runs"]} == {2}
    assert {len(run["losses"]) for run in found["runs"]} == {gpu.WARM_STEPS + 2}
    peaks = {run["contender"]: run["peak_bytes"] for run in found["runs"]}
    assert peaks[gpu.EIGHT_BITS] < min(peak for key, peak in peaks.items() if key != gpu.EIGHT_BITS)
    assert (found["shape"]["layers"], found["predicted"], found["computes"]) == (3, {}, False)
    assert gpu.NO_FIGURES in done.stdout
    assert gpu.table(found["runs"], {}) in done.stdout
