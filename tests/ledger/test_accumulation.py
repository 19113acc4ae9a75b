"""Gradients of several micro-batches: the first one writes them, each following one reads and writes them once."""

from collections import Counter

import lightning as L
import pytest
import torch

from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.step import launches
from benchmarks.rivals import models
from lightning_lowprec import FP8TorchAO, HalfMixed

DEVICE = torch.device("cuda")
PLUGINS = {
    "bf16-remainder": lambda: HalfMixed("bf16", master_weights="remainder"),
    "bf16-8bit": lambda: HalfMixed("bf16", master_weights="8bit"),
    "fp8-hybrid-remainder": lambda: FP8TorchAO(master_weights="remainder", compile=False),
    "fp8-hybrid-8bit": lambda: FP8TorchAO(master_weights="8bit", compile=False),
    "fp8-hybrid-8bit, blocks compiled": lambda: FP8TorchAO(master_weights="8bit", compile=True),
}


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rehearsed if "compiled" in name else ()) for name in PLUGINS]
)
def test_the_first_micro_batch_adds_nothing_and_others_move_six_bytes_per_parameter(name):
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=PLUGINS[name]())
    model = fabric.setup_module(models.build(models.TOY, DEVICE))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=True))
    (batch,) = models.batches(models.TOY, 4, DEVICE, count=1)

    def micro_batch():
        loss = model(*batch)
        with torch.autograd.set_multithreading_enabled(False), recording() as log, Moved() as moved:
            fabric.backward(loss)
        added = [op.bytes for op in moved.operations if op.name.startswith("add_")]
        return Counter(launches(log)), added

    for _ in range(3):
        (first, written), (second, added), (third, again) = (micro_batch() for _ in range(3))
        optimizer.step()
        optimizer.zero_grad()
    parameters = list(model.parameters())
    assert written == []
    assert sorted(added) == sorted(again) == sorted(6 * p.numel() for p in parameters)  # of bf16: two read, one written
    assert (second - first).total() == len(parameters)
    assert second == third
    assert first - second == Counter()
