"""Gradients on their way to the masters: float32, unscaled once, accumulated, dropped."""

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.optimizer import (
    add_masters,
    held_masters,
    main_params,
    move_grads_to_masters,
    refresh_masters,
    show_master_grads,
)

every_form = pytest.mark.parametrize("form", ["fp32", "remainder", "stochastic"])


def sgd(*params, form="fp32", lr=1.0):
    return add_masters(optim.SGD(params, lr=lr), form)


def half(*values, dtype=torch.bfloat16):
    return nn.Parameter(torch.tensor(values).to(dtype))


@every_form
@pytest.mark.parametrize("inv_scale", [0.5, torch.tensor(0.5)])
def test_moves_once_and_unscales_in_float32(form, inv_scale):
    p, plain, unused = half(1.0, 2.0), nn.Parameter(torch.ones(2)), half(3.0)
    optimizer = sgd(p, plain, unused, form=form)
    p.grad, plain.grad = torch.tensor([1.0, 3.0]).bfloat16(), torch.tensor([4.0, 8.0])
    for _ in range(2):
        move_grads_to_masters(optimizer, inv_scale)
    assert p.grad is None
    master, same, third = main_params(optimizer)
    assert same is plain
    assert torch.equal(master.grad, torch.tensor([0.5, 1.5]))
    assert torch.equal(plain.grad, torch.tensor([2.0, 4.0]))
    assert third.grad is None
    assert torch.equal(master, torch.tensor([1.0, 2.0]))  # values may be read between preparation and step
    optimizer.step()
    assert torch.equal(p, torch.tensor([0.5, 0.5]).bfloat16())
    assert torch.equal(plain, torch.tensor([-1.0, -3.0]))
    assert torch.equal(unused, torch.tensor([3.0]).bfloat16())
    assert all(m.grad is None for m in held_masters(optimizer))


def test_unscaling_keeps_what_fp16_cannot_hold():
    p = half(1.0, dtype=torch.float16)
    optimizer = sgd(p)
    p.grad = torch.full_like(p, 6e-8)
    move_grads_to_masters(optimizer, 2.0**-16)
    (master,) = main_params(optimizer)
    assert master.grad.item() == pytest.approx(2.0**-24 * 2.0**-16)


def test_a_new_gradient_of_a_float32_parameter_is_unscaled_again():
    plain = nn.Parameter(torch.ones(1))
    optimizer = sgd(plain, half(1.0), lr=0.0)
    for end in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), optimizer.step):
        plain.grad = torch.full_like(plain, 4.0) if plain.grad is None else plain.grad.fill_(4.0)
        move_grads_to_masters(optimizer, 0.5)
        move_grads_to_masters(optimizer, 0.5)
        assert plain.grad.item() == 2.0
        end()


@every_form
def test_preparing_after_every_micro_batch_accumulates_in_float32(form):
    p = half(1.0)
    optimizer = sgd(p, form=form)
    for _ in range(1024):
        (p * 0.25).sum().backward()
        move_grads_to_masters(optimizer)
    (master,) = main_params(optimizer)
    assert master.grad.item() == 256.0  # bf16 stops at 64: 64.25 rounds back


@every_form
@pytest.mark.parametrize("inv_scale", [1.0, 0.5, torch.tensor(0.5)])
def test_float32_gradients_are_handed_over(form, inv_scale):
    p = half(1.0)
    p.grad_dtype = torch.float32
    optimizer = sgd(p, form=form)
    (p * 0.25).sum().backward()
    first = p.grad
    move_grads_to_masters(optimizer, inv_scale)
    (master,) = main_params(optimizer)
    assert master.grad is first
    assert p.grad is None
    (p * 0.5).sum().backward()  # a micro-batch after clipping
    move_grads_to_masters(optimizer, inv_scale)
    assert master.grad.item() == 0.75 * float(inv_scale)
    show_master_grads(optimizer)
    assert p.grad is master.grad
    optimizer.step()
    assert p.grad_dtype is torch.float32
    assert p.item() == 1 - 0.75 * float(inv_scale)


@every_form
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_both_kinds(form, set_to_none):
    p, q = half(1.0), half(1.0)
    optimizer = sgd(p, q, form=form)
    p.grad = torch.ones_like(p)
    move_grads_to_masters(optimizer)
    q.grad = torch.ones_like(q)
    optimizer.zero_grad(set_to_none)
    optimizer.step()
    assert p.tolist() == q.tolist() == [1.0]
    if form != "fp32":  # a skipped step leaves no float32 behind
        p.grad = torch.ones_like(p)
        move_grads_to_masters(optimizer)
        optimizer.zero_grad()
        assert all(store.buffer.flat.untyped_storage().nbytes() == 0 for store in optimizer._masters.stores)


@every_form
def test_clipping_sees_float32_gradients(form):
    p = half(*[1.0] * 16)
    optimizer = sgd(p, form=form)
    p.grad = torch.ones_like(p)
    move_grads_to_masters(optimizer)
    norm = nn.utils.clip_grad_norm_(main_params(optimizer), 1.0)
    assert norm.item() == 4.0
    assert next(main_params(optimizer)).grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    optimizer.step()
    assert p[0].item() == 0.75


@every_form
def test_sparse_gradients(form):
    embedding = nn.Embedding(5, 3, sparse=True).bfloat16()
    before = embedding.weight.detach().clone()
    optimizer = sgd(embedding.weight, form=form)
    for row in ([1, 1], [3]):
        embedding(torch.tensor(row)).sum().backward()
        move_grads_to_masters(optimizer, 0.5)
    assert next(main_params(optimizer)).grad.is_sparse
    optimizer.step()
    moved = (embedding.weight - before).float()
    assert torch.allclose(moved[1], torch.full((3,), -1.0), atol=2e-2)
    assert torch.allclose(moved[3], torch.full((3,), -0.5), atol=2e-2)
    assert bool((moved[[0, 2, 4]] == 0).all())


@pytest.mark.parametrize("zero", [True, False])
def test_closures_without_zero_grad_do_not_add_up_evaluations(zero):
    p = half(4.0)
    optimizer = add_masters(optim.LBFGS([p], lr=0.1, max_iter=3), "fp32")
    weights = []

    def closure():
        if zero:
            optimizer.zero_grad()
        weights.append(p.item())
        loss = p.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    # 4 - 0.1 is 3.90625 in bf16, of gradient 7.8125: a slope of (8 - 7.8125) / 0.1; then 3.9 - 0.1 * 7.8125 / 1.875
    assert weights == [4.0, 3.90625, 3.484375]


def test_only_wrapped_optimizers():
    plain = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for call in (move_grads_to_masters, refresh_masters):
        with pytest.raises(
            TypeError, match=r"expected an optimizer with masters, got SGD\. Call `add_masters` on it first"
        ):
            call(plain)
    assert list(main_params(plain)) == plain.param_groups[0]["params"]
    assert held_masters(plain) == []
