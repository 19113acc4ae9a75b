"""Means of the monitor are over layers, not over readings."""

import pytest

from lightning_lowprec.callbacks import NumericsMonitor
from tests.callbacks.test_monitor import LAYERS, Net, fit, pytestmark  # noqa: F401


def test_the_mean_of_the_output_counts_a_layer_with_two_readings_as_one_with_three(tmp_path):
    class Finetuned(Net):
        def training_step(self, batch, batch_idx):  # no gradient reaches the frozen layers below
            return self(batch).float().square().mean()

    net, monitor = Finetuned(), NumericsMonitor(every=1)
    net.blocks[0].requires_grad_(False)
    _, trainer = fit(tmp_path, monitor, net, steps=1)
    decibels = {reading.fqn: reading.output_db for reading in monitor.readings}
    assert [r.tensor for r in monitor.readings] == ["input", "weight"] * 2 + ["input", "weight", "gradient"] * 2
    assert decibels.keys() == LAYERS
    assert trainer.callback_metrics["lowprec/mean/output_db"].item() == pytest.approx(sum(decibels.values()) / 4)
