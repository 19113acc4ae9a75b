"""The real DeepSpeed on a CPU: `make test-deepspeed`. Without DeepSpeed the tests that need it are not collected."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
if not find_spec("transformer_engine"):
    collect_ignore_glob.append("test_zero_te.py")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.deepspeed.worker", str(folder / "seen.pt")]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return {**torch.load(folder / "seen.pt"), "said": ended.stdout + ended.stderr}
