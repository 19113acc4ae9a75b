"""Optimizers without a kernel step some masters at a time: the same numbers, and memory for a bucket only."""

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters import registry
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.private.torch_optimizers import steps_alone
from tests.masters.master_loops import equal, net, train

FORMS = {"fp32": {}, "remainder": {"form": "remainder"}, "stochastic": {"form": "stochastic", "seed": 3}}
OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, foreach=True),
}


class Lion(optim.Optimizer):
    """As a user writes it (Chen et al., arXiv 2302.06675); notes how many parameters a call sees."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append(len(params))
        for p in params:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-self.param_groups[0]["lr"])
            m.lerp_(p.grad, 0.01)


class IndependentLion(Lion):
    independent_parameters = True


@pytest.fixture
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(registry, "BUCKET", 1)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_one_parameter_at_a_time_gives_the_bits_of_all_at_once(form, make, monkeypatch):
    found = []
    for size in (1, registry.BUCKET):
        monkeypatch.setattr(registry, "BUCKET", size)
        model = net().bfloat16()
        optimizer = add_masters(OPTIMIZERS[make](model.parameters()), MasterConfig(**FORMS[form]))
        train(model, optimizer, range(5))
        assert len(optimizer._masters.stores) == (4 if size == 1 else 1)
        found.append((list(model.parameters()), optimizer.state_dict()["state"]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert equal(found[0][1], found[1][1])


def test_an_optimizer_of_the_user_sees_all_parameters_unless_it_says_that_it_need_not(one_at_a_time):
    found = {}
    for cls, calls in ((Lion, [4, 4]), (IndependentLion, [1] * 8)):
        model = net().bfloat16()
        optimizer = add_masters(cls(model.parameters()), MasterConfig(form="remainder"))
        train(model, optimizer, range(2))
        assert optimizer.seen == calls
        found[cls] = list(model.parameters())
    assert all(map(torch.equal, found[Lion], found[IndependentLion]))


def test_step_hooks_see_all_masters(one_at_a_time):
    model = net().bfloat16()
    assert not steps_alone(type("Mine", (optim.AdamW,), {})(model.parameters()), type("Mine", (optim.AdamW,), {}))
    seen = []
    optimizer = add_masters(optim.AdamW(model.parameters()), MasterConfig())
    assert steps_alone(optimizer, optim.AdamW)
    optimizer.register_step_pre_hook(lambda found, *_: seen.append([p.dtype for p in found.param_groups[0]["params"]]))
    train(model, optimizer, range(1))
    assert seen == [[torch.float32] * 4]


def test_float32_parameters_step_beside_the_buckets(one_at_a_time):
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    exact = [p.detach().clone() for p in model[1].parameters()]
    optimizer = add_masters(optim.SGD(model.parameters(), lr=1.0), MasterConfig())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, before in zip(model[1].parameters(), exact, strict=True):
        assert torch.equal(p, before - 1)
        assert p.grad is not None, "as after the step of the plain optimizer"
    assert all(p.grad is None for p in model[0].parameters())
