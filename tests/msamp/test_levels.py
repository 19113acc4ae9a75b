"""The levels of MS-AMP stay within 1.5 % of float32's loss: 60 steps of a small GPT by Fabric, AdamW."""

import math
import statistics

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lightning_lowprec.tools.demo import ByteGPT, StdlibText

pytestmark = pytest.mark.slow


def loss_of(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def train(precision, steps=60):
    """Return the validation loss."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    bare = ByteGPT(depth=2, width=64, block_size=64)
    configured = bare.configure_optimizers()
    model, optimizer = fabric.setup(bare, configured["optimizer"])
    data = StdlibText(seed=0, block_size=64, train_windows=16_384)
    data.setup("fit")
    for _, batch in zip(range(steps), data.train_dataloader(), strict=False):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        configured["lr_scheduler"]["scheduler"].step()
    with torch.no_grad():
        return statistics.fmean(loss_of(model, batch).item() for batch in data.val_dataloader())


def test_losses_are_those_of_float32():
    levels = ("msamp-o1", "msamp-o2", "msamp-o3")
    reference, *losses = (train(precision) for precision in ("32-true", *levels))
    assert reference < 0.75 * math.log(256), "it has learned something"
    for level, loss in zip(levels, losses, strict=True):
        assert loss == pytest.approx(reference, rel=0.015), level
        assert loss != reference, "the levels are not float32 under another name"
    assert losses[2] == losses[1], "both multiply by the same float16 weights, rounded to e4m3"
