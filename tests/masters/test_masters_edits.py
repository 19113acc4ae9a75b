"""Masters under edits, moves, exceptions and copies, and in optimizers of other people."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.optimizer import add_masters, held_masters, main_params
from lightning_lowprec.masters.stores import Store
from tests.masters.master_loops import (
    ADAMW,
    EXACT,
    SGD,
    by_hand,
    equal,
    every_exact_form,
    every_form,
    half,
    loss_of,
    masters_of,
    step,
    train,
    wrapped,
)

# ---- wrap


def edit_in_place(p, value):
    with torch.no_grad():
        p.copy_(value)


def edit_by_new_data(p, value):
    p.data = value.bfloat16()


@every_form
@pytest.mark.parametrize("edit", [edit_in_place, edit_by_new_data])
def test_edits_are_noticed(form, edit):
    p = half(1.0, 1.0, 1.0)
    optimizer = add_masters(optim.SGD([p], lr=1e-4), form)
    step(optimizer, p, grad=1.0)
    unedited = masters_of(optimizer)[0][0] if form in EXACT else None
    edit(p, torch.stack([p[0].detach(), *torch.tensor([3.0, 0.0]).bfloat16()]))
    step(optimizer, p)
    assert p[1:].tolist() == [3.0, 0.0]
    if form in EXACT:  # the element that was not edited keeps what its master had beyond the weight
        assert masters_of(optimizer)[0][0] == unedited


@every_exact_form
def test_refresh_takes_values_that_round_to_the_weights(form):
    p = half(1.0, 1.0)
    optimizer = add_masters(optim.SGD([p], lr=1e-3), form)
    optimizer._masters.refresh({id(p): torch.tensor([1.001, 5.0])})
    assert torch.equal(masters_of(optimizer)[0], torch.tensor([1.001, 1.0]))


@every_form
def test_pruned_weights_stay_numbers(form):
    """In remainder form a leftover below zero would borrow from the sign bit of a zero."""
    p = nn.Parameter(torch.randn(512).bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=1e-3), form)
    step(optimizer, p, grad=1.0)
    p.data.mul_(0.0)  # unnoticed, and -0.0 where the weight was negative
    if form == "fp32":
        optimizer._masters.refresh(None)
    step(optimizer, p)
    assert bool((p.abs() < 1e-30).all())


@every_form
def test_parameters_that_moved_get_new_stores(form, monkeypatch):
    """Stands for `model.to(device)` after wrapping, on a machine with one device."""
    model, optimizer = wrapped(SGD, form)
    train(model, optimizer, range(3))
    old = optimizer._masters.stores[0]
    monkeypatch.setattr(Store, "moved", lambda store: store is old)
    train(model, optimizer, range(3, 6))
    assert optimizer._masters.stores[0] is not old
    if form in EXACT:
        reference, _, masters = by_hand(SGD, form, 6)
        assert equal(masters_of(optimizer), masters)
        assert equal(list(model.parameters()), list(reference.parameters()))


# ---- closures that fail


@every_exact_form
def test_an_exception_in_the_closure_leaves_everything_as_it_was(form):
    model, optimizer = wrapped(ADAMW, form)
    train(model, optimizer, range(2))

    def broken():
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(broken)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    train(model, optimizer, range(2, 5))
    reference, _, masters = by_hand(ADAMW, form, 5)
    assert equal(masters_of(optimizer), masters)
    assert equal(list(model.parameters()), list(reference.parameters()))


class Broken(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise KeyError("no batch")


@every_form
def test_an_exception_in_the_middle_of_a_step_leaves_weights_and_masters_in_step(form):
    model, optimizer = wrapped(partial(Broken, lr=0.1), form)
    start = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    with pytest.raises(KeyError, match="no batch"):
        optimizer.step()
    assert not equal(start, list(model.parameters()))
    if form in EXACT:
        assert equal([m.bfloat16() for m in masters_of(optimizer)], [p.detach() for p in model.parameters()])
    if form != "fp32":
        assert all(store.flat.untyped_storage().nbytes() == 0 for store in optimizer._masters.stores)
    assert all(m.grad is None for m in held_masters(optimizer))


# ---- copies


def test_copies_of_an_optimizer_that_was_never_stepped_or_has_fp32_parameters():
    optimizer = add_masters(optim.SGD([half(1.0), nn.Parameter(torch.ones(1))], lr=1.0), "remainder")
    assert equal(copy.deepcopy(optimizer).state_dict(), optimizer.state_dict())


# ---- anything that subclasses Optimizer


class Stubborn(optim.Optimizer):
    """Own arguments of `step`, own state not by parameter, `p.data` arithmetic, moves before it evaluates."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        self.state["calls"] = 0

    def step(self, closure=None, factor=1.0):
        self.state["calls"] += 1
        for p in self.param_groups[0]["params"]:
            p.data.add_(1.0)
        loss = closure()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad.data, alpha=-self.param_groups[0]["lr"] * factor).sub_(1.0)
        return loss


@every_form
def test_an_optimizer_of_somebody_else(form):
    p = nn.Parameter(torch.ones(1024).bfloat16())
    optimizer = add_masters(Stubborn([p]), form)

    def closure():
        optimizer.zero_grad()
        (2 * p).sum().backward()
        return 7

    for _ in range(5):
        assert optimizer.step(closure, factor=0.5) == 7
    assert abs(p.detach().float().mean().item() - 0.995) < 2e-3  # the grid is 4e-3 wide
    assert optimizer.state_dict()["state"]["calls"] == 5
    assert next(iter(main_params(optimizer))).shape == p.shape
