"""A converted weight that no optimizer holds warns, and one that was replaced raises."""

import lightning as L
import pytest
import torch
from torch import nn

FORGOTTEN = r"'(net\.)?[01]\.weight' \(and 1 more\) is trainable and in no optimizer.*`requires_grad_\(False\)`"
STALE = r"'(net\.)?1\.weight' \(and 1 more\) is in no optimizer, but an optimizer holds a parameter of its shape"


def step(parameters, net):
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    net, optimizer = fabric.setup(net, torch.optim.SGD(parameters, lr=0.1))
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()


def test_a_forgotten_layer_warns_a_replaced_one_raises_and_a_second_stage_over_one_backbone_is_neither():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.warns(UserWarning, match=FORGOTTEN):
        step(net[0].parameters(), net)
    held = [*net.parameters()]
    net[1] = nn.Linear(16, 16)  # what other packages' conversions do after the optimizer is built
    with pytest.raises(RuntimeError, match=STALE):
        step(held, net)
    backbone = nn.Linear(16, 16)
    for net in [nn.Sequential(backbone, nn.Linear(16, 16)) for _ in range(2)]:
        step(net.parameters(), net)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["fp8-hybrid", "msamp-o3", "int8-mixed", "fp8-hybrid-8bit"])
def test_modules_of_torchscript_stay_and_train(name):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = nn.Sequential(torch.jit.script(nn.Linear(32, 32)), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped, optimizer = fabric.setup(model, optimizer)
    before = [p.detach().float().clone() for p in model.parameters()]
    fabric.backward(wrapped(torch.randn(16, 32)).square().sum())
    optimizer.step()
    assert type(model[0]) is torch.jit.RecursiveScriptModule
    assert type(model[1]) is not nn.Linear
    assert all((p.detach().float() != b).any() for p, b in zip(model.parameters(), before, strict=True))
