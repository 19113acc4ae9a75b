"""A model that the user compiled as a whole is known as such while Fabric or the Trainer sets it up."""

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_lowprec.private import lightning as private
from tests.toys import ON_CPU

compiled_or_not = pytest.mark.parametrize("compiled", [False, True])


def recorder(base):
    """A precision plugin that asks when it converts."""

    class Recorder(base):
        seen: bool | None = None

        def convert_module(self, module):
            self.seen = private.is_compiled_whole(module)
            return module

    return Recorder()


@compiled_or_not
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_in_fabric(compiled, with_optimizer):
    plugin, model = recorder(FabricPrecision), nn.Linear(2, 2)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    given = torch.compile(model, backend="eager") if compiled else model
    if with_optimizer:
        fabric.setup(given, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        fabric.setup_module(given)
    assert plugin.seen == compiled
    assert not private.is_compiled_whole(model), "Fabric notes it while it sets up only"


@compiled_or_not
def test_in_the_trainer(compiled):
    plugin, model = recorder(Precision), BoringModel()
    trainer = L.Trainer(plugins=plugin, max_steps=0, **ON_CPU)
    trainer.fit(torch.compile(model, backend="eager") if compiled else model)
    assert plugin.seen == compiled


def test_a_lost_name_is_listed(monkeypatch):
    assert private.moved() == []
    monkeypatch.setattr(private, "UNWRAPPED_NAME", "renamed")
    lost = ["Fabric.setup, variable renamed", "Fabric.setup_module, variable renamed"]
    assert private.moved() == lost
