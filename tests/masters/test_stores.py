"""What stores promise: memory for a bucket only, rounding on which replicas agree, and state dicts for every form."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters import registry
from lightning_lowprec.masters.moments import MASTER_PARAM
from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.masters.stores import StochasticStore
from lightning_lowprec.private.torch_optimizers import steps_alone
from tests.masters.master_loops import (
    ADAMW,
    EXACT,
    equal,
    every_exact_form,
    every_form,
    masters_of,
    net,
    through_file,
    train,
    without_masters,
    wrapped,
)

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@every_form
def test_one_parameter_at_a_time_gives_the_bits_of_all_at_once(form, make, monkeypatch):
    found = []
    for size in (1, registry.BUCKET):
        monkeypatch.setattr(registry, "BUCKET", size)
        model = net().bfloat16()
        optimizer = add_masters(OPTIMIZERS[make](model.parameters()), MasterConfig(form=form, seed=3))
        train(model, optimizer, range(5))
        assert len(optimizer._masters.stores) == (4 if size == 1 else 1)
        found.append((list(model.parameters()), optimizer.state_dict()["state"]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert equal(found[0][1], found[1][1])


def test_step_hooks_see_all_masters(monkeypatch):
    """So does an optimizer of the user, unless it says that it need not."""
    monkeypatch.setattr(registry, "BUCKET", 1)
    model = net().bfloat16()
    for members, alone in (({}, False), ({"independent_parameters": True}, True)):
        mine = type("Mine", (optim.AdamW,), members)
        assert steps_alone(mine(model.parameters()), mine) is alone
    seen = []
    optimizer = add_masters(optim.AdamW(model.parameters()), MasterConfig())
    assert steps_alone(optimizer, optim.AdamW)
    optimizer.register_step_pre_hook(lambda found, *_: seen.append([p.dtype for p in found.param_groups[0]["params"]]))
    train(model, optimizer, range(1))
    assert seen == [[torch.float32] * 4]


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


def trained(form, steps=5, make=ADAMW):
    model, optimizer = wrapped(make, form)
    train(model, optimizer, range(steps))
    return model, optimizer


@every_exact_form
def test_the_state_of_an_optimizer_on_bf16_weights_becomes_float32_for_good(form):
    plain = net().bfloat16()
    saved = ADAMW(plain.parameters())
    train(plain, saved, range(4))
    model, optimizer = wrapped(ADAMW, form, seed=3)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(through_file(saved.state_dict()))
    moments = [entry["exp_avg_sq"] for entry in optimizer.state_dict()["state"].values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert equal([master.bfloat16() for master in masters_of(optimizer)], [p.detach() for p in plain.parameters()])
    train(model, optimizer, range(4, 6))
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert not torch.equal(moment, moment.bfloat16().float())
    add_masters(saved, form)
    assert {entry["exp_avg_sq"].dtype for entry in saved.state.values()} == {torch.float32}


@every_form
def test_hooks_of_state_dicts(form):
    _, optimizer = trained(form)
    calls = []
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": calls.append("saved")})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    state = optimizer.state_dict()
    assert "mine" in state
    optimizer.load_state_dict(state)
    assert calls == ["saved", "loaded"]


@every_exact_form
def test_weights_that_the_masters_do_not_round_to_win(form):
    _, optimizer = trained(form)
    other_model, other = wrapped(ADAMW, form, seed=3)
    weights = [p.detach().float() for p in other_model.parameters()]
    other.load_state_dict(optimizer.state_dict())
    assert equal(masters_of(other), weights)


@pytest.mark.parametrize("first", EXACT)
@pytest.mark.parametrize("second", EXACT)
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_carry_over_between_exact_forms_at_ties_too(first, second, model_first):
    """A master half way between two bf16: the forms round it to different weights, and agree on the master."""
    tie = (
        torch.tensor([0x3F808000, 0x3F818000, -0x407F8000 & 0xFFFFFFFF, 0x3F800001]).to(torch.int32).view(torch.float32)
    )
    p = nn.Parameter(tie.bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=0.0), first, values={id(p): tie})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    weight, state = p.detach().clone(), through_file(optimizer.state_dict())
    q = nn.Parameter(torch.randn(4).bfloat16())
    resumed = add_masters(optim.SGD([q], lr=0.0), second)
    loads = [lambda: resumed.load_state_dict(state), torch.no_grad()(lambda: q.copy_(weight))]
    for load in reversed(loads) if model_first else loads:
        load()
        resumed.zero_grad()  # whatever a script does between the two, the masters wait
    q.grad = torch.zeros_like(q)
    resumed.step()
    assert torch.equal(resumed.state_dict()["state"][0][MASTER_PARAM], tie)


def test_masters_are_there_before_the_first_step_and_without_other_state():
    _, optimizer = trained("remainder", steps=0, make=partial(optim.SGD, lr=1.0))
    assert all(list(entry) == [MASTER_PARAM] for entry in optimizer.state_dict()["state"].values())
    assert equal(masters_of(optimizer), [p.detach() for p in net().parameters()])
    assert without_masters(optimizer.state_dict())["state"] == {}
    _, adamw = trained("remainder", steps=0)  # an entry with nothing but a master must not look initialized to Adam
    model, other = trained("fp32", steps=0)
    other.load_state_dict(adamw.state_dict())
    assert len(other.state) == 0
    train(model, other, range(1))
