"""The main job: FP8 training of a real text model by one word, in the Trainer and the CLI, and under DDP."""

import math
import os
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests import forked
from tests.toys import ON_CPU

SIZES = {"depth": 2, "width": 64, "heads": 2, "block_size": 64}
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


def data() -> StdlibText:
    return StdlibText(block_size=64, batch_size=8, max_bytes=1_000_000, train_windows=1600, val_windows=64)


def final_losses(precision: str) -> tuple[float, float]:
    losses = []

    class Recorder(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].item())
            assert "fp8" not in precision or len(trainer.precision_plugin.plan.converted) == 8

    torch.manual_seed(0)
    model = ByteGPT(**SIZES)
    trainer = L.Trainer(precision=precision, max_steps=200, callbacks=[Recorder()], **ON_CPU)
    trainer.fit(model, datamodule=data())
    assert trainer.global_step == 200
    assert losses[0] == pytest.approx(math.log(256), rel=0.02), "an untrained byte model knows nothing"
    return sum(losses[-20:]) / 20, trainer.validate(model, datamodule=data(), verbose=False)[0]["val_loss"]


@pytest.mark.slow
def test_fp8_stays_within_one_percent_of_fp32_after_200_steps():
    train, val = final_losses("32-true")
    assert val < 3.2, "it must have learned something for the comparison to mean anything"
    for precision in ("fp8-hybrid", "fp8-rowwise"):
        fp8_train, fp8_val = final_losses(precision)
        assert fp8_train == pytest.approx(train, rel=0.01)
        assert fp8_val == pytest.approx(val, rel=0.01)
        assert fp8_train != train, "nothing ran in FP8"


COMMAND = ["-m", "lightning_lowprec.tools.cli"]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_cli_trains_the_gpt(tmp_path):
    result = forked.python(
        *COMMAND, "fit",
        "--model=lightning_lowprec.tools.demo.ByteGPT", "--model.depth=1", "--model.width=32", "--model.heads=2",
        "--data=lightning_lowprec.tools.demo.StdlibText", "--data.train_windows=64", "--trainer.precision=fp8-hybrid",
        "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.limit_val_batches=1",
        cwd=tmp_path, environ=ENVIRON,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "converted 4 of 5 linear layers, kept 1 in bf16: output head (by name) ('lm_head')" in result.stderr
    checkpoint = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)
    ByteGPT(depth=1, width=32, heads=2).load_state_dict(checkpoint["state_dict"])
