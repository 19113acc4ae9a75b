"""Converted layers whose weight the model reads without a call."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec import FP8TorchAO

WIDTH, TOKENS = 64, 32


class Reader(nn.Module):
    """Attention as timm's BEiT writes it: the class reads the weight of `qkv` and calls `proj`."""

    def __init__(self):
        super().__init__()
        self.read, self.proj = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH)}), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = F.linear(x, self.read.qkv.weight, self.read.qkv.bias).chunk(3, -1)
        return self.proj(F.sigmoid(q + k) * v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.calls = nn.Sequential(Reader(), Reader()), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.mlp(x if self.calls == 1 else self.attention(x))


def train(model, caught, precision="fp8-hybrid"):
    how = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    fabric = L.Fabric(accelerator="cpu", **how)
    _teacher = fabric.setup_module(Model())  # the plan is that of the last one
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for _ in range(3):
        fabric.backward(wrapped(torch.randn(TOKENS, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [said for w in caught if "first training forward" in (said := str(w.message))], fabric.strategy.precision


PER_LAYER = FP8TorchAO({"*.qkv": "rowwise", "*": "tensorwise"})


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-rowwise", "msamp-o2", "int8-mixed", "mxfp8", PER_LAYER])
def test_a_layer_whose_weight_is_read_is_named_once_and_counts_as_kept(name, caught):
    (message,), plugin = train(model := Model(), caught, name)
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert f"`precision='{plugin.precision}'`: converted layers were not called" in message
    assert "'attention.0.read.qkv', 'attention.1.read.qkv'. The module" in message
    assert "`keep=['qkv']`" in message
    assert plugin.plan.converted == ("attention.0.proj", "attention.1.proj", "mlp")
    of_rows = {row.fqn for row in plugin.plan.rows if row.recipe}
    assert of_rows == plugin.plan.recipes.keys() == (set(plugin.plan.converted) if name is PER_LAYER else set())
    assert "not called in the first training forward ('attention.0.read.qkv'" in plugin.plan.summary()
    again, plugin = train(model, caught, name)
    assert again == [message], "once, though the model is set up again"
    assert plugin.plan.converted == ("attention.0.proj", "attention.1.proj", "mlp")
    kept = train(model, [], FP8TorchAO(keep=["attention.0.read.qkv"]))[1].plan
    assert (kept.rows[0].kept_because, kept.converted) == ("kept by 'attention.0.read.qkv'", plugin.plan.converted)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.later = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.experts[1](x.to(self.later.weight.dtype)) + self.again.weight.square().mean()
        return checkpoint(self.again, x, use_reentrant=False) + self.again.forward(x)


def test_no_false_alarm(caught):
    assert train(Mixture(), caught)[0] == []
    assert train(torch.compile(Model(), backend="eager"), caught)[0] == [], "compiled code is not judged"
