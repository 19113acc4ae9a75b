"""The main job: FP8 training of a real text model by one word."""

import lightning as L
import pytest
import torch

from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests.toys import ON_CPU


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_fp8_stays_within_one_percent_of_float32_after_200_steps():
    def final(precision):
        torch.manual_seed(0)
        model = ByteGPT(depth=2, width=64, heads=2, block_size=64)
        data = StdlibText(block_size=64, batch_size=8, max_bytes=1_000_000, train_windows=1600, val_windows=64)
        trainer = L.Trainer(precision=precision, max_steps=200, **ON_CPU)
        trainer.fit(model, datamodule=data)
        return trainer.validate(model, datamodule=data, verbose=False)[0]["val_loss"]

    expected = final("32-true")
    assert expected < 3.2, "it learns"
    for precision in ("fp8-hybrid", "fp8-rowwise"):
        assert 0 < abs(final(precision) / expected - 1) < 0.01
