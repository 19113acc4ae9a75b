"""State dicts: what they hold, and that any form of masters loads what any other, and a plain optimizer, saved."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.moments import MASTER_PARAM
from lightning_lowprec.masters.optimizer import add_masters
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


def trained(form, steps=5, make=ADAMW):
    model, optimizer = wrapped(make, form)
    train(model, optimizer, range(steps))
    return model, optimizer


@every_form
def test_what_it_holds(form):
    model, optimizer = trained(form)
    state = through_file(optimizer.state_dict())
    assert list(state["state"]) == [0, 1, 2, 3]
    for p, entry in zip(model.parameters(), state["state"].values(), strict=True):
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
        assert entry["exp_avg"].shape == p.shape
        assert (MASTER_PARAM in entry) == (form in EXACT)
        if form in EXACT:
            assert entry[MASTER_PARAM].dtype == torch.float32
            assert torch.equal(entry[MASTER_PARAM].bfloat16(), p)
    assert not any(MASTER_PARAM in entry for entry in optimizer.state.values())
    assert equal(optimizer.state_dict(), state)


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


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
def test_loads_a_plain_optimizer(form, dtype, model_first):
    plain_model = net().to(dtype)
    plain = ADAMW(plain_model.parameters())
    train(plain_model, plain, range(4))
    saved = through_file({"model": plain_model.state_dict(), "optimizer": plain.state_dict()})
    model, optimizer = wrapped(ADAMW, form, seed=3)
    loads = [lambda: model.load_state_dict(saved["model"]), lambda: optimizer.load_state_dict(saved["optimizer"])]
    for load in loads if model_first else reversed(loads):
        load()
    for p, now in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        assert now["exp_avg_sq"].dtype == torch.float32
        if form in EXACT:
            assert torch.equal(now[MASTER_PARAM].to(p.dtype), p)
    train(model, optimizer, range(4, 6))
    if form in EXACT:
        moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
        assert not torch.equal(moment, moment.bfloat16().float())  # float32 for good


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
def test_masters_wait_for_the_model_through_zero_grad_and_saving(form):
    """Between loading the optimizer and the model, whatever a script does, the masters stay."""
    model, optimizer = trained(form)
    masters = masters_of(optimizer)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = wrapped(ADAMW, form, seed=3)
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    model.load_state_dict(saved["model"])
    optimizer.zero_grad()
    assert equal(masters_of(optimizer), masters)
    optimizer.step()  # no gradients
    assert equal(masters_of(optimizer), masters)


@every_exact_form
def test_weights_that_the_masters_do_not_round_to_win(form):
    _, optimizer = trained(form)
    other_model, other = wrapped(ADAMW, form, seed=3)
    weights = [p.detach().float() for p in other_model.parameters()]
    other.load_state_dict(optimizer.state_dict())
    assert equal(masters_of(other), weights)


def test_the_wrong_number_of_parameters_is_torchs_error_and_changes_nothing():
    _, optimizer = trained("remainder")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict())
    assert equal(optimizer.state_dict(), before)


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
    q.grad = torch.zeros_like(q)
    resumed.step()
    assert torch.equal(resumed.state_dict()["state"][0][MASTER_PARAM], tie)
