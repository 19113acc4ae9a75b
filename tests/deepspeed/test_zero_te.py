"""Transformer Engine's layers under ZeRO 1 and 2, one rank, by the reference quantizers; needs both libraries."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lightning_lowprec import FP8TE
from tests.deepspeed import on_cpu
from tests.te import reference
from tests.te.reference import Net
from tests.toys import stepped


@pytest.fixture
def on_the_cpu(monkeypatch):
    reference.run_on_cpu(monkeypatch)
    on_cpu.allow()


def losses(strategy, **how):
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy, **how)
    fabric.launch()
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.bfloat16())
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    torch.manual_seed(1)
    x = torch.randn(64, 32)
    y = torch.randn(64, 16) * 0.1
    return stepped(fabric, optimizer, (F.mse_loss(model(x).float(), y) for _ in range(8)))


def test_zero_trains_as_one_device_with_float32_masters(on_the_cpu):
    expected = losses("auto", plugins=FP8TE(reference.current_scaling(), norms=False, master_weights=True))
    assert expected[-1] < expected[0]
    for stage in (1, 2):  # in one test: DeepSpeed keeps process groups, which end with a test
        assert losses(f"deepspeed_stage_{stage}", plugins=FP8TE(reference.current_scaling(), norms=False)) == expected


def test_zero_3_and_weights_in_fp8_are_refused(on_the_cpu):
    with pytest.raises(
        ValueError, match=r"ZeRO-3: Transformer Engine keeps weights .* Use stage 1 or 2, or 'fp8-hybrid'"
    ):
        L.Fabric(accelerator="cpu", devices=1, strategy="deepspeed_stage_3", plugins=FP8TE())
    with pytest.raises(ValueError, match=r"`fp8_params=True` keeps weights in FP8, .* Leave it out"):
        L.Fabric(accelerator="cpu", devices=1, strategy="deepspeed_stage_2", plugins=FP8TE(fp8_params=True))
