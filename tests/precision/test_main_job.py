"""The main job: FP8 training of a real text model by one word."""

import math

import lightning as L
import pytest
import torch

from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests.toys import ON_CPU

SIZES = {"depth": 2, "width": 64, "heads": 2, "block_size": 64}
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
