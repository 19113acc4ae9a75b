"""HalfEval: training is that of 32-true, evaluation that of bf16 autocast, bit for bit."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import HalfEval
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import Sharding
from tests.toys import ON_CPU

QUIET = {**ON_CPU, "max_epochs": 1}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses, self.seen = net(), [], []

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        assert output.dtype is torch.float32
        loss = F.mse_loss(output, batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.net(batch[0]).detach())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)
        return self.seen[-1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches():
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)
    )
    return torch.utils.data.DataLoader(data, batch_size=8)


def half(model, batch):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(batch)


def test_in_the_trainer():
    mine, plain = Model(), Model()
    trainer = L.Trainer(plugins=HalfEval(), **QUIET)
    assert trainer.precision_plugin.peak_rate_dtype is torch.float32  # steps are float32
    trainer.fit(mine, batches(), batches())
    L.Trainer(precision="32-true", **QUIET).fit(plain, batches(), batches())
    assert mine.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    mine.seen.clear()
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(mine, batches())
        for output, (x, _) in zip(mine.seen, batches(), strict=True):
            assert output.dtype is torch.bfloat16
            assert torch.equal(output, half(plain.net, x))
        mine.seen.clear()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_fabric(dtype):
    fabric = L.Fabric(accelerator="cpu", plugins=HalfEval(dtype))
    model = net()
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 16)
    assert torch.equal(wrapped(x), net()(x))
    wrapped.eval()
    name = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with torch.no_grad(), torch.autocast("cpu", name):
        expected = net()(x.to(name))
    output = wrapped(x)
    assert torch.equal(output, expected.float())
    assert not torch.equal(output, net()(x))
    wrapped.train()
    fabric.backward(wrapped(x).sum())
    assert model[0].weight.grad.dtype is torch.float32


def test_refusals():
    with pytest.raises(ValueError, match="`dtype='bf16-true'` is not valid; expected one of: bf16, fp16"):
        HalfEval("bf16-true")
    with pytest.raises(
        ValueError, match=r"does not run under FSDP2, which gathers weights in one dtype\. Use '32-true'"
    ):
        Sharding(ShardOptions()).meet(HalfEval(), torch.device("cpu"))
