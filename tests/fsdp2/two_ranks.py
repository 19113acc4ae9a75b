"""Two gloo ranks on this machine, from a script that writes what each of them saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning_lowprec
from tests.fsdp2.ranks import free_port

ROOT = Path(lightning_lowprec.__file__).parents[1]


def run(script, folder):
    """Start ``script folder`` once per rank; each must leave ``rank<n>.json`` in ``folder``, which come back."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env={**environ, "LOCAL_RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-3000:] for text in said)
    return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2)]
