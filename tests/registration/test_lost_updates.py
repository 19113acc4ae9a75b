"""Lightning's own precisions with half weights say once per process which updates they lose, and what keeps them."""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_lowprec_autoload as autoload

SAID = "loses every update below 1/512 of its weight. precision='bf16-remainder' of lightning_lowprec keeps all of them"


OfSomebodyElse = type("OfSomebodyElse", (torch.optim.SGD,), {"__module__": "torchao.optim"})  # may keep masters


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(autoload, "_told", set())
    monkeypatch.setattr(autoload, "info", lines.append)
    return lines


def fit(precision, make=torch.optim.SGD, frozen=False):
    class Model(BoringModel):
        def configure_optimizers(self):
            return make(self.parameters(), lr=0.1)

        def on_train_start(self):
            self.layer.requires_grad_()  # Lightning trains no model without a trainable weight

    model = Model()
    model.layer.requires_grad_(not frozen)
    L.Trainer(precision=precision, accelerator="cpu", max_steps=1, barebones=True).fit(model)


def step(precision, make=torch.optim.SGD):
    fabric = L.Fabric(precision=precision, accelerator="cpu")
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, make(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()


@pytest.mark.parametrize(
    ("train", "precision", "words"),
    [
        (fit, "bf16-true", SAID),
        (step, "bf16-true", SAID),
        (fit, "16-true", "below 1/4096 of its weight. precision='fp16-master'"),
    ],
)
def test_one_line_per_process(said, train, precision, words):
    train("bf16-mixed")
    train(precision, make=OfSomebodyElse)
    assert said == []
    train(precision)
    train(precision)
    (line,) = said
    assert words in line
    assert "LOWPREC_AUTOLOAD=0" in line


def test_no_line_where_the_switch_is_off_or_nothing_trains(said, monkeypatch):
    fit("bf16-true", frozen=True)
    monkeypatch.setenv("LOWPREC_AUTOLOAD", "0")
    fit("bf16-true")
    monkeypatch.delenv("LOWPREC_AUTOLOAD")
    L.Trainer(precision="bf16-true", accelerator="cpu", barebones=True, limit_val_batches=1).validate(BoringModel())
    assert said == []
