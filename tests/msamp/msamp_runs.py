"""A small model, its data and its runs, for the tests of MSAMP."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import scale_linears
from tests.precision.weights_left import as_trained
from tests.toys import ON_CPU

LEVELS = ["O1", "O2", "O3"]
every_level = pytest.mark.parametrize("level", LEVELS)
CHATTER = "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"
"""torch >= 2.11 under lightning <= 2.6."""


class Net(L.LightningModule):
    def __init__(self, make=lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 16)
        self.make = make
        self.losses = []

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()).relu())

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch).float(), batch.flip(-1))
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch).float(), batch.flip(-1)))

    def configure_optimizers(self):
        return self.make(self)


class Batches(list):
    def __init__(self, count=4):
        generator = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(8, 16, generator=generator) for _ in range(count))


def linear(level, **options):
    """Return a Linear(32, 48) with a weight of codes, and its values before."""
    torch.manual_seed(0)
    module = nn.Linear(32, 48)
    start = module.weight.detach().clone()
    scale_linears(module, [""], level, **options)
    return module, start


def coded(module):
    return [fqn for fqn, part in module.named_modules() if hasattr(getattr(part, "weight", None), "msamp_state")]


def fit(plugin, module=None, epochs=2, path=None, **options):
    precision = {"precision": plugin} if isinstance(plugin, str) else {"plugins": [as_trained(plugin)]}
    trainer = L.Trainer(**precision, max_epochs=epochs, **ON_CPU, **options)
    module = module or Net()
    trainer.fit(module, Batches(), ckpt_path=path)
    return module, trainer


def in_fabric(module, optimizer, plugin=None):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[plugin or MSAMP("O2")])
    return fabric, *fabric.setup(module, optimizer)
