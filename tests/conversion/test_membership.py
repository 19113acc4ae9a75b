"""A converted weight that no optimizer holds raises, in Trainer and Fabric, and says what to do."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "accelerator": "cpu",
}  # fmt: skip


def model():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


class Module(L.LightningModule):
    def __init__(self, optimize):
        super().__init__()
        self.net, self.optimize = model(), optimize

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.optimize(self.net), lr=0.1)


def fit(optimize):
    loader = torch.utils.data.DataLoader(torch.ones(8, 16), batch_size=4)
    L.Trainer(precision="fp8-hybrid", max_epochs=1, **QUIET).fit(Module(optimize), loader)


def fabric_step(optimizers, net, precision="fp8-hybrid"):
    fabric = L.Fabric(precision=precision, accelerator="cpu")
    net, *optimizers = fabric.setup(net, *optimizers)
    net(torch.ones(4, 16)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


FORGOTTEN = r"'(net\.)?1\.weight' \(and 1 more\) is trainable and in no optimizer.*`requires_grad_\(False\)`"
STALE = r"'(net\.)?1\.weight' \(and 1 more\) is in no optimizer, but an optimizer holds a parameter of its shape"


def test_forgotten():
    with pytest.raises(RuntimeError, match=FORGOTTEN):
        fit(lambda net: net[0].parameters())
    net = model()
    with pytest.raises(RuntimeError, match=FORGOTTEN):
        fabric_step([torch.optim.SGD(net[0].parameters(), lr=0.1)], net)


def test_stale():
    def stale(net):
        parameters = list(net.parameters())
        net[1] = nn.Linear(16, 16)  # what other packages' conversions do after the optimizer is built
        net[1].requires_grad_(True)
        return parameters

    net = model()
    optimizer = torch.optim.SGD(stale(net), lr=0.1)
    with pytest.raises(RuntimeError, match=STALE):
        fabric_step([optimizer], net)


def test_frozen_layers_and_several_optimizers_are_fine():
    fit(lambda net: net[1].requires_grad_(False) and net[0].parameters())
    net = model()
    fabric_step([torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[1].parameters())], net)


def test_optimizers_set_up_apart_from_the_model_and_from_each_other():
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    net = model()
    first = fabric.setup_optimizers(torch.optim.SGD(net[0].parameters(), lr=0.1))
    module = fabric.setup_module(net)
    second = fabric.setup_optimizers(torch.optim.SGD(net[1].parameters(), lr=0.1))
    module(torch.ones(4, 16)).sum().backward()
    first.step()
    second.step()


def test_a_second_model_may_get_its_optimizer_later_or_never():
    """A GAN's discriminator, a teacher: same names, same shapes, nothing of it in any optimizer yet."""
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    generator, discriminator = model(), model()
    first, optimizer = fabric.setup(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    second = fabric.setup_module(discriminator)
    second(first(torch.ones(4, 16))).sum().backward()
    optimizer.step()
    late = fabric.setup_optimizers(torch.optim.SGD(discriminator.parameters(), lr=0.1))
    late.step()


def test_a_forgotten_layer_of_either_model_is_named():
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    generator, discriminator = model(), model()
    first, optimizer = fabric.setup(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    _second = fabric.setup(discriminator, torch.optim.SGD(discriminator[0].parameters(), lr=0.1))
    first(torch.ones(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=FORGOTTEN):
        optimizer.step()


def test_groups_and_state_of_an_early_optimizer_stay():
    net = model()
    optimizer = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}])
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    fabric = L.Fabric(plugins=FP8TorchAO(), accelerator="cpu")
    _, wrapped = fabric.setup(net, optimizer)
    assert [group["lr"] for group in wrapped.param_groups] == [0.5, 1e-3]
    assert all(torch.equal(v, optimizer.state[p][k]) for p in net.parameters() for k, v in state[id(p)].items())


def test_two_stages_over_one_backbone():
    """A second model shares a part of the first, which is still alive and no longer trained."""
    backbone = nn.Linear(16, 16)
    stages = [nn.Sequential(backbone, nn.Linear(16, 16)) for _ in range(2)]
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    for net in stages:
        module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        module(torch.ones(4, 16)).sum().backward()
        optimizer.step()
