"""Gradients of a loss that was never scaled are not divided by the scale: the step raises."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import ON_CPU

NAMES = ("fp16-master", "fp8-hybrid-fp16")
REFUSED = pytest.raises(RuntimeError, match=r"no loss was scaled since the last step.*`self\.manual_backward\(loss\)`")


class Manual(L.LightningModule):
    """Manual optimization without ``self.manual_backward``; ``way``: how the network gets its gradients."""

    def __init__(self, way):
        super().__init__()
        self.automatic_optimization, self.way = False, way
        self.net = nn.Linear(32, 16)

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self.net(batch[0]).float(), torch.ones(8, 16))
        if self.way == "plain":
            loss.backward()
        else:
            for p, grad in zip(self.parameters(), torch.autograd.grad(loss, [*self.parameters()]), strict=True):
                p.grad = grad.to(p.dtype)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("way", ["plain", "assigned"])
def test_the_trainer(precision, way):
    trainer = L.Trainer(precision=precision, max_steps=6, **ON_CPU)
    with REFUSED:
        trainer.fit(Manual(way), DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=8))


@pytest.mark.parametrize("precision", NAMES)
def test_fabric(precision):
    fabric = L.Fabric(accelerator="cpu", precision=precision)
    model = nn.Linear(32, 32)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.step()  # without gradients
    for _ in range(2):  # gradients of two backward passes are one step
        fabric.backward(model(torch.randn(8, 32)).float().square().mean())
    optimizer.step()
    for p in model.parameters():  # of `loss.backward()` Fabric itself says what to write
        p.grad = torch.ones_like(p)
    with REFUSED:
        optimizer.step()
