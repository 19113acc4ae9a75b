"""HalfMixed on a GPU: fp16 with loss scaling, bf16, and what "auto" chooses."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import HalfMixed
from tests.gpu.device import DEVICE, NO_VALUES, on_gpu_only
from tests.gpu.subjects import Stack, batches


def train(**chosen):
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, **chosen)
    module = fabric.setup_module(Stack())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=3e-3))
    found = []
    for _ in range(10):
        for x, y in batches():
            loss = nn.functional.mse_loss(module(x.to(DEVICE)).float(), y.to(DEVICE))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    return found, fabric.strategy.precision


def test_bf16_is_lightnings_bit_for_bit():
    ours, _ = train(plugins=HalfMixed("bf16"))
    theirs, _ = train(precision="bf16-mixed")
    assert ours == theirs or NO_VALUES


@on_gpu_only
def test_fp16_is_close_to_lightnings():
    ours, plugin = train(plugins=HalfMixed("fp16"))
    theirs, _ = train(precision="16-mixed")
    assert ours[-5:] == pytest.approx(theirs[-5:], rel=0.1) or NO_VALUES
    assert plugin.scaler is not None
    assert ours[-1] < 0.8 * ours[0] or NO_VALUES


def test_auto_takes_bf16_here():
    found, plugin = train(precision="half-auto")
    assert plugin.autocast_dtype is torch.bfloat16
    assert plugin.scaler is None
    assert found[-1] < 0.8 * found[0] or NO_VALUES
