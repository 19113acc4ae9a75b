"""Every example runs."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FILES = [path for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".ipynb"]
"""tests/test_notebook.py runs the notebook."""
ON_CPU = ["--precision=fp8-hybrid", "--hidden=64", "--layers=2"]
"""Without a GPU, torchao in place of Transformer Engine."""
OF_CLI = ["--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=1"]
RUNS = {
    "fsdp2.py": (["--steps=3", "--devices=2"], "fsdp2: all-gather: float8"),
    "fabric_loop.py": (["--steps=3"], "final loss"),
    "hf_finetune.py": (["--steps=3"], "loss of the saved model in float32"),
    "te_llama.py": (["--steps=3", *ON_CPU], "saved to te_llama"),
    "train_then_serve.py": (["--steps=3"], "14 weights: the codes are those of the last step, bit for bit"),
    "trainer_script.py": (["--steps=3", "--keep", "blocks.0"], "kept: kept by 'blocks.0'"),
    "two_precisions.py": (["--steps=3"], "6 steps, 3 of them in FP8"),
    "lightning_cli.yaml": (OF_CLI, "`Trainer.fit` stopped: `max_steps=3` reached"),
}
"""The arguments of each, and what it says."""
LOWPREC = ["-m", "lightning_lowprec.tools.cli"]
LAUNCHER = [*LOWPREC, "run", "--precision=bf16-mixed", "--main-port=29484"]


def run(name: str, cwd: Path, *more: str, launcher: Sequence[str] = ()) -> str:
    path = str(EXAMPLES / name)
    start = [*launcher, path] if name.endswith(".py") else [*LOWPREC, "fit", "--config", path]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": "29483"}
    result = forked.python(*start, *RUNS[name][0], *more, cwd=cwd, environ=environ)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in FILES))
def test_example_runs(name, tmp_path):
    said = run(name, tmp_path)
    assert RUNS[name][1] in said
    if name == "fsdp2.py":
        assert all(f"rank {rank} of 2 holds" in said for rank in (0, 1)), said
    if name == "fabric_loop.py":
        resumed = run(name, tmp_path, "--resume=fabric_loop.ckpt", launcher=LAUNCHER)
        assert "final loss" in resumed
        assert "`--precision=bf16-mixed` wins over `precision='fp8-hybrid'` of the script." in resumed
