"""State dicts: what they hold, and that any form of masters loads what any other, and a plain optimizer, saved."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.moments import MASTER_PARAM
from tests.masters.master_loops import equal, masters_of, net, through_file, train, without_masters, wrapped

FORMS = ["fp32", "remainder", "stochastic"]
EXACT = FORMS[:2]
every_form = pytest.mark.parametrize("form", FORMS)
ADAMW = partial(optim.AdamW, lr=1e-3)


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


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("model_first", [True, False])
def test_any_form_loads_any_other(first, second, model_first):
    model, optimizer = trained(first)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other_model, other = wrapped(ADAMW, second, seed=3)
    loads = [lambda: other_model.load_state_dict(saved["model"]), lambda: other.load_state_dict(saved["optimizer"])]
    for load in loads if model_first else reversed(loads):
        load()
    entries = other.state_dict()["state"]
    for p, key in zip(model.parameters(), entries, strict=True):
        entry, was = entries[key], saved["optimizer"]["state"][key]
        assert torch.equal(entry["exp_avg"].float(), was["exp_avg"].float())
        if second in EXACT:
            assert torch.equal(entry[MASTER_PARAM], was.get(MASTER_PARAM, p.detach().float()))
    train(other_model, other, range(5, 7))


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
def test_a_plain_float32_optimizer_loads_it_without_the_masters(form):
    _, optimizer = trained(form)
    saved = through_file(optimizer.state_dict())
    plain_model = net()
    plain = ADAMW(plain_model.parameters())
    plain.load_state_dict(without_masters(saved))
    assert all(entry["exp_avg"].dtype == torch.float32 for entry in plain.state.values())
    assert not any(MASTER_PARAM in entry for entry in plain.state.values())
    train(plain_model, plain, range(5, 7))


@every_form
def test_loading_by_keyword_and_by_names(form):
    """As torch.distributed.checkpoint does."""
    _, optimizer = trained(form)
    saved = through_file(optimizer.state_dict())
    names = {i: f"layer.{i}" for i in range(4)}
    saved["state"] = {names[i]: entry for i, entry in saved["state"].items()}
    saved["param_groups"][0]["params"] = list(names.values())
    _, other = wrapped(ADAMW, form, seed=4)
    other.load_state_dict(state_dict=saved)
    assert equal(list(other.state_dict()["state"][2]), list(saved["state"]["layer.2"]))
    assert equal(other.state_dict()["state"][2]["exp_avg"].float(), saved["state"]["layer.2"]["exp_avg"].float())


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


@pytest.mark.parametrize("form", EXACT)
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


@pytest.mark.parametrize("form", EXACT)
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
