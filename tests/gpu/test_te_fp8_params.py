"""Weights kept in FP8 by Transformer Engine's kernels."""

from importlib.util import find_spec

import lightning as L
import pytest
import torch
from torch import nn

from tests.gpu.device import DEVICE, DRY, NO_VALUES
from tests.gpu.subjects import WIDTH, batches
from tests.gpu.test_te import every_recipe, plugin_for
from tests.toys import Stack, gelu_block

pytestmark = pytest.mark.skipif(DRY or find_spec("transformer_engine") is None, reason="needs Transformer Engine's GPU")


class Layers(Stack):
    """Without norms and without an output head."""

    def __init__(self, width=WIDTH):
        super().__init__(lambda: gelu_block(width, norm=False), seed=0)


def train(recipe, steps=6, **options):
    """Losses of steps of two micro-batches, an evaluation at the end, and the model."""
    plugin = plugin_for(recipe, **options)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    model = Layers()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, inputs = [], [x.to(DEVICE).bfloat16() for x, _ in batches(2)]
    for _ in range(steps):
        for x in inputs:
            loss = nn.functional.mse_loss(module(x).float(), x.float().flip(-1))
            fabric.backward(loss / 2)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        losses += [nn.functional.mse_loss(module(x).float(), x.float().flip(-1)).item() for x in inputs]
    return losses, model


@every_recipe
def test_kept_weights_change_nothing(recipe):
    kept, model = train(recipe, fp8_params=True)
    plain, _ = train(recipe)
    if recipe == "delayed":  # has another scale for the second quantisation of the same weight
        assert kept == pytest.approx(plain, rel=2e-2) or NO_VALUES
    else:
        assert kept == plain or NO_VALUES
    assert kept[-1] < 0.9 * kept[0] or NO_VALUES
    assert all(layer._fp8_workspaces for block in model.blocks for layer in (block[0], block[2]))
