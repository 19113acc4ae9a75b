"""Every refusal in the table of docs/what-runs-where.md raises as the table says, and what it names instead runs."""

import re

import lightning as L
import pytest
import schedulefree
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import prune

import lightning_lowprec
from lightning_lowprec import FP8TorchAO
from tests.site.pages import DOCS
from tests.toys import ON_CPU

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = (DOCS / "what-runs-where.md").read_text().partition("## What is refused")[2].partition("\n## ")[0]
LINES = re.findall(r"^\| .*$", TABLE, re.MULTILINE)[1:]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES]
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, MisconfigurationException)
SPACE = {"FP8TorchAO": FP8TorchAO}


class Model(L.LightningModule):
    def __init__(self, width=32, make=torch.optim.AdamW):
        super().__init__()
        self.layers, self.make = nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width)), make

    def training_step(self, batch, batch_idx):
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=1e-3)


def asked(code):
    """A name or a plugin as the argument of a Trainer or of Fabric."""
    of = eval(code, SPACE)
    return {"precision" if isinstance(of, str) else "plugins": of}


def fit(code, width=32, make=torch.optim.AdamW, **options):
    batches = torch.utils.data.DataLoader(torch.randn(8, width), batch_size=4)
    L.Trainer(**asked(code), max_epochs=1, **ON_CPU, **options).fit(Model(width, make), batches)


class Training(L.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].train()


def layers(code):
    return L.Fabric(**asked(code), accelerator="cpu").setup_module(Model().layers)


def twice(code):
    x = torch.randn(4, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(layers(code)(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def pruned(code):
    module = layers(code)
    prune.random_unstructured(module.module[0], "weight", 0.5)
    module(torch.randn(4, 32))


def exported(code):
    module = layers("'fp8-hybrid'").module
    model = eval(code, {"lightning_lowprec": lightning_lowprec, "model": module}) if "(" in code else module
    torch.export.export(model, (torch.randn(4, 32),))


ACTIONS = {
    "LBFGS": lambda code: fit(code, make=torch.optim.LBFGS),
    "schedule-free": lambda code: fit(code, make=schedulefree.AdamWScheduleFree, callbacks=[Training()]),
    "optimizers other than": lambda code: fit(code, make=torch.optim.RMSprop),
    "gradients of gradients": twice,
    "to prune": pruned,
    "a model without": lambda code: fit(code, width=20),
    "`torch.export`": exported,
}
"""What a row asks for, by its beginning."""


def codes(cell):
    return re.findall("`([^`]+)`", cell)


def test_every_row_has_an_action():
    assert [next(start for start in ACTIONS if row[0].startswith(start)) for row in ROWS] == list(ACTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:30])
def test_the_row_is_refused_and_the_alternative_runs(row):
    action = next(ACTIONS[start] for start in ACTIONS if row[0].startswith(start))
    for code in codes(row[1]):
        with pytest.raises(REFUSALS, match=re.escape(row[2])):
            action(code)
    for code in codes(row[4]):
        action(code)
