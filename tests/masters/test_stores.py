"""What stores promise: memory for a bucket only, no cost per parameter, and rounding on which replicas agree."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.masters import registry
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, move_grads_to_masters
from lightning_lowprec.masters.stores import StochasticStore
from lightning_lowprec.private.torch_optimizers import steps_alone
from tests.masters.master_loops import equal, net, train, wrapped

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


# ---- rounding at random


def test_stochastic_rounding_keeps_small_updates_on_average():
    p = nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=1e-3), "stochastic")
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    # the grid below 1 is 2^-8 wide: at most 5 roundings of variance 2^-18 each per weight
    assert abs(p.float().mean().item() - 0.995) < 5 * (5 * 2.0**-18 / 4096) ** 0.5


def test_replicas_agree_whatever_their_generators_and_other_seeds_of_masters_do_not():
    weights = []
    for seed, of_masters in ((1, 0), (2, 0), (2, 1)):
        make = partial(optim.AdamW, lr=1e-3)
        model, optimizer = wrapped(make, MasterConfig(form="stochastic", seed=of_masters))
        torch.manual_seed(seed)
        train(model, optimizer, range(8))
        assert torch.initial_seed() == seed
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert torch.equal(*weights[:2])
    assert not torch.equal(*weights[1:])


# ---- cost


class Count(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += func not in (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default)  # views are free
        return func(*args, **(kwargs or {}))


def ops_of_a_step(tensors, dtype, form):
    params = [nn.Parameter(torch.randn(4, 3).to(dtype)) for _ in range(tensors)]
    optimizer = optim.AdamW(params, foreach=True)
    if dtype is torch.bfloat16:
        add_masters(optimizer, form)
    for _ in range(3):  # the first makes the state
        for p in params:
            p.grad = torch.ones_like(p)
        with Count() as count:
            if dtype is torch.bfloat16:
                move_grads_to_masters(optimizer)
            optimizer.step()
    return count.ops


@pytest.mark.parametrize("form", FORMS)
def test_a_step_costs_the_same_number_of_calls_for_any_number_of_parameters(form):
    """Beyond those of the same optimizer on float32 parameters."""
    few, many = (ops_of_a_step(n, torch.bfloat16, form) - ops_of_a_step(n, torch.float32, form) for n in (2, 40))
    assert few == many
    assert few < 100


def test_memory_that_is_there_is_not_allocated_again():
    """torch's `resize_` to the same size allocates a second time and copies."""
    store = StochasticStore([torch.ones(100, dtype=torch.bfloat16)], {}, seed=0, start=0)
    store.allocate()
    address = store.flat.data_ptr()
    store.views[0].fill_(3)
    store.allocate()
    assert store.flat.data_ptr() == address
    assert store.views[0].eq(3).all()
    store.release()
    assert store.flat.untyped_storage().size() == 0
    store.allocate()
    assert store.flat.untyped_storage().size() == store.flat.numel() * 4
