"""`DDPStrategy(ddp_comm_hook=fp8_gradient_hook)` runs on CPU too, where Lightning registers no hook."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import lightning_lowprec
from lightning_lowprec import fp8_gradient_hook
from tests.toys import ON_CPU, in_e4m3

GRADIENT = [1.0, -0.3, 0.01, 7e-4, 3e-3]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(len(GRADIENT)))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).sum()  # the batch is the gradient

    def on_after_backward(self):
        self.seen = self.weight.grad.tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradient_of(strategy, **options):
    model = Model()
    trainer = L.Trainer(devices=1, strategy=strategy, max_steps=1, **ON_CPU, **options)
    trainer.fit(model, torch.utils.data.DataLoader(torch.tensor([GRADIENT]), batch_size=1))
    torch.distributed.destroy_process_group()
    return model.seen


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"precision": "half-auto"}], ids=str)
def test_the_gradient_arrives_in_fp8(options, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29489")
    expected = in_e4m3(torch.tensor(GRADIENT)).tolist()
    assert expected != pytest.approx(GRADIENT, rel=1e-3)
    wrapped = []
    wrapper = (lambda hook: wrapped.append(hook) or hook) if options else None
    assert gradient_of(DDPStrategy(ddp_comm_hook=fp8_gradient_hook, ddp_comm_wrapper=wrapper), **options) == expected
    assert wrapped == [fp8_gradient_hook] * bool(options)


def test_other_hooks_are_left_to_lightning(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29489")
    exact = torch.tensor(GRADIENT).tolist()
    assert gradient_of(DDPStrategy(ddp_comm_hook=bf16_compress_hook)) == exact
    lightning_lowprec.unregister()
    try:
        assert gradient_of(DDPStrategy(ddp_comm_hook=fp8_gradient_hook)) == exact, "Lightning registers hooks now"
    finally:
        lightning_lowprec.register()
