"""Gradients of a loss that was never scaled are not divided by the scale: the step raises."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("fp16-master", "fp8-hybrid-fp16")
REFUSED = pytest.raises(RuntimeError, match=r"no loss was scaled since the last step.*`self\.manual_backward\(loss\)`")


def nets():
    torch.manual_seed(0)
    return nn.Linear(32, 32), nn.Linear(32, 16)


class Manual(L.LightningModule):
    """Manual optimization of two networks; ``ways``: how each of the two gets its gradients."""

    def __init__(self, *ways):
        super().__init__()
        self.automatic_optimization, self.ways = False, ways
        self.first, self.second = nets()

    def training_step(self, batch, _):
        for optimizer, net, way in zip(self.optimizers(), (self.first, self.second), self.ways, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(net(batch[0]).float(), torch.ones(8, net.out_features))
            if way == "scaled":
                self.manual_backward(loss)
            elif way == "plain":
                loss.backward()
            else:
                for p, grad in zip(net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True):
                    p.grad = grad.to(p.dtype)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), 0.1) for net in (self.first, self.second)]


def fit(model, precision):
    trainer = L.Trainer(
        accelerator="cpu", precision=precision, max_steps=6, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=8))
    return trainer


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("ways", [("plain", "plain"), ("assigned", "assigned")])
def test_the_trainer(precision, ways):
    with REFUSED:
        fit(Manual(*ways), precision)


@pytest.mark.parametrize("ways", [("scaled", "scaled"), ("plain", "plain"), ("assigned", "scaled")])
def test_a_precision_that_scales_nothing_takes_every_way(ways):
    assert fit(Manual(*ways), "bf16-master").global_step == 6


def test_scaled_losses_of_two_optimizers_train():
    assert fit(Manual("scaled", "scaled"), "fp16-master").global_step == 6


@pytest.mark.parametrize("precision", NAMES)
def test_fabric(precision):
    fabric = L.Fabric(accelerator="cpu", precision=precision)
    model = nets()[0]
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.step()  # without gradients
    for _ in range(2):  # gradients of two backward passes are one step
        fabric.backward(model(torch.randn(8, 32)).float().square().mean())
    optimizer.step()
    for p in model.parameters():  # of `loss.backward()` Fabric itself says what to write
        p.grad = torch.ones_like(p)
    with REFUSED:
        optimizer.step()


def test_one_backward_for_two_optimizers():
    fabric = L.Fabric(accelerator="cpu", precision="fp16-master")
    first, second = nets()
    first, one = fabric.setup(first, torch.optim.SGD(first.parameters(), 0.1))
    second, two = fabric.setup(second, torch.optim.SGD(second.parameters(), 0.1))
    before = [p.detach().clone() for p in second.parameters()]
    fabric.backward(second(first(torch.randn(8, 32))).float().square().mean())
    one.step()
    two.step()
    assert all(not torch.equal(p, old) for p, old in zip(second.parameters(), before, strict=True))
