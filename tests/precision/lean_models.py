"""Models and loops for plugins that update parameters during the backward pass."""

import re

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import lightning_lowprec
from lightning_lowprec import HalfMixed, MasterConfig
from tests.contract.contract_models import Batches, trainer_with
from tests.precision.weights_left import as_trained

LEAN_NAMES = ["bf16-lean", "bf16-lean-sr", "fp8-lean"]
WIDTH = 64  # squared: the smallest weight whose moments get 8 bits


class Net(L.LightningModule):
    """Two Linears with coded moments; their biases and the norm keep float32 moments."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx=0):
        loss = F.mse_loss(self(batch).float(), batch.float().flip(-1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches(count, first=0):
    generator = torch.Generator().manual_seed(7)
    return Batches(*[torch.randn(32, WIDTH, generator=generator) for _ in range(first + count)][first:])


def plugin(form="remainder", moments="8bit", update="backward", **options):
    return HalfMixed("bf16", master_weights=MasterConfig(form=form, moments=moments, update=update, **options))


def in_fabric(precision, model, optimizer):
    """Fabric on one CPU with a model and an optimizer set up; ``precision`` is a name."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    return (fabric, *fabric.setup(model, optimizer))


def step(fabric, module, optimizer, batch):
    optimizer.zero_grad()
    loss = F.mse_loss(module(batch).float(), batch.flip(-1))
    fabric.backward(loss)
    optimizer.step()
    return loss.item()


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def fit(model, precision, steps=3, *, ckpt_path=None, **options):
    """Epochs of 3 steps; the end of an epoch is where Lightning resumes with the next batch."""
    end = {"max_epochs": steps // 3} if steps % 3 == 0 else {"max_steps": steps, "max_epochs": -1}
    trainer = trainer_with(precision if precision == "32-true" else as_trained(precision), **end, **options)
    trainer.fit(model, batches(3), ckpt_path=ckpt_path)
    return trainer


def codes(argument, error):
    """Return the values of an argument that a message writes as code."""
    written = [code for code in re.findall("`(.*?)`", str(error)) if code.startswith(argument)]
    return [eval(code.removeprefix(argument), vars(lightning_lowprec)) for code in written]
