"""Everything else that happens to an optimizer: groups, schedulers, hooks, edits of weights, errors, copies."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params
from lightning_lowprec.masters.registry import registry_of
from tests.masters.master_loops import equal, masters_of, net, train, wrapped

EXACT = ["fp32", "remainder"]
FORMS = [*EXACT, "stochastic"]
every_form = pytest.mark.parametrize("form", FORMS)
every_exact_form = pytest.mark.parametrize("form", EXACT)
ADAMW = partial(optim.AdamW, lr=1e-3)
SGD = partial(optim.SGD, lr=1e-2, momentum=0.9)


def half(*values):
    return nn.Parameter(torch.tensor(values).bfloat16())


def step(optimizer, *params, grad=0.0):
    for p in params:
        p.grad = torch.full_like(p, grad)
    optimizer.step()


# ---- wrap


@every_form
def test_class_and_what_the_groups_show(form):
    model, optimizer = wrapped(ADAMW, form)
    params = list(model.parameters())
    assert isinstance(optimizer, optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert registry_of(optimizer) is not None
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.extend(o.param_groups[0]["params"]))
    for act in (lambda: train(model, optimizer, range(2)), lambda: optimizer.load_state_dict(optimizer.state_dict())):
        act()
        shown = optimizer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(shown, params, strict=True))
        assert all(p is q for p, q in zip(optimizer.state, params, strict=True))
    assert {p.dtype for p in seen} == {torch.float32}


@every_form
def test_wrapping_twice_changes_nothing(form):
    model, optimizer = wrapped(ADAMW, form)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    assert add_masters(optimizer, form) is optimizer
    assert equal(optimizer.state_dict(), before)
    assert type(optimizer).__mro__[1] is optim.AdamW


def test_errors_of_wrap():
    p = nn.Parameter(torch.ones(2).half())
    plain = optim.SGD([p], lr=1.0)
    with pytest.raises(ValueError, match=r"`form='fp23'` is not valid; expected one of: fp32, remainder, s"):
        add_masters(plain, "fp23")
    for moments in ("bf16", "stochastic", "fp8"):
        with pytest.raises(ValueError, match=rf"`moments='{moments}'` is not valid; expected one of: fp32, 8bit\."):
            MasterConfig(moments=moments)
    for form in ("remainder", "stochastic"):
        with pytest.raises(ValueError, match=r"keeps masters of torch\.bfloat16 parameters, got torch\.float16"):
            add_masters(plain, form)
    assert type(plain) is optim.SGD
    add_masters(plain)
    with pytest.raises(RuntimeError, match=r"already has masters by .*'fp32'.* asked for .*'remainder'"):
        add_masters(plain, "remainder")
    replaced = optim.SGD([half(1.0)], lr=1.0)
    replaced.step = lambda: None
    with pytest.raises(RuntimeError, match="`step` of this SGD hides its class"):
        add_masters(replaced)


def test_a_parameter_that_changed_its_dtype_raises():
    model, optimizer = wrapped(ADAMW, "fp32")
    model.float()
    with pytest.raises(
        RuntimeError, match=r"was torch\.bfloat16 when .* is torch\.float32 now\. Cast the model.*`ModelPruning"
    ):
        train(model, optimizer, range(1))


@every_exact_form
@pytest.mark.parametrize("make", [optim.Adagrad, optim.Adam])
def test_wrapping_after_half_precision_steps_keeps_the_state(make, form):
    model = net().bfloat16()
    optimizer = make(model.parameters(), lr=1e-3)
    train(model, optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    add_masters(optimizer, form)
    for key, entry in before.items():
        now = optimizer.state_dict()["state"][key]
        assert all(equal(value.float(), now[name]) for name, value in entry.items())
    train(model, optimizer, range(3, 6))


@every_form
def test_memory_goes_with_the_optimizer_without_the_garbage_collector(form):
    model, optimizer = wrapped(ADAMW, form)
    train(model, optimizer, range(2))
    flat = weakref.ref(optimizer._masters.stores[0].flat)
    gc.disable()
    try:
        del optimizer
        assert flat() is None
    finally:
        gc.enable()


# ---- groups


@every_exact_form
def test_float32_parameters_are_their_own_masters(form):
    params = [nn.Parameter(torch.linspace(-1, 1, 5)), half(0.3, -0.7), nn.Parameter(torch.ones(3).double())]
    copies = [nn.Parameter(p.detach().clone().to(torch.promote_types(p.dtype, torch.float32))) for p in params]
    optimizer, reference = add_masters(ADAMW(params), form), ADAMW(copies)
    for i in range(5):
        for p, q in zip(params, copies, strict=True):
            p.grad = torch.full_like(p, 0.5**i)
            q.grad = p.grad.to(q.dtype)
        optimizer.step()
        reference.step()
    assert torch.equal(params[0], copies[0])
    assert torch.equal(params[2], copies[2])
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[1]["master_param"], copies[1])
    assert "master_param" not in state[0]
    assert "master_param" not in state[2]


@every_exact_form
def test_groups_added_later_and_two_dtypes(form):
    model, optimizer = wrapped(SGD, form)
    train(model, optimizer, range(2))
    late, plain = half(1.0, 2.0), nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late, plain], "lr": 1e-3, "momentum": 0.0})
    for _ in range(5):
        step(optimizer, late, plain, grad=1.0)
    state = optimizer.state_dict()["state"]
    assert torch.allclose(state[4]["master_param"], torch.tensor([0.995, 1.995]), atol=1e-6)
    assert torch.allclose(plain, torch.full((2,), 0.995), atol=1e-6)
    assert len(optimizer.param_groups) == 2
    if form == "fp32":
        fp16 = nn.Parameter(torch.ones(2).half())
        optimizer.add_param_group({"params": fp16})
        step(optimizer, fp16)
        assert optimizer.state_dict()["state"][6]["master_param"].dtype == torch.float32


def test_parameters_put_into_a_group_by_hand_get_masters():
    """As a sharding strategy does: the list of the group is changed in place."""
    first, second = half(1.0), half(1.0)
    optimizer = add_masters(optim.SGD([first], lr=1e-3), "remainder")
    optimizer.param_groups[0]["params"][:] = [second]
    for _ in range(5):
        step(optimizer, second, grad=1.0)
    assert masters_of(optimizer)[0].item() == pytest.approx(0.995, abs=1e-6)


@every_form
def test_unfreezing_later(form):
    model, optimizer = wrapped(ADAMW, form)
    frozen = model[0].weight.requires_grad_(False)
    before = frozen.clone()
    train(model, optimizer, range(3))
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    train(model, optimizer, range(8))
    assert not torch.equal(frozen, before)


@every_form
def test_layouts_empty_and_scalar_parameters(form):
    params = [
        nn.Parameter(torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)),
        nn.Parameter(torch.tensor(1.0).bfloat16()),
        nn.Parameter(torch.zeros(0, 3).bfloat16()),
        nn.Parameter(torch.randn(6, 4).bfloat16().t()),
    ]
    optimizer = add_masters(optim.AdamW(params, lr=0.5), form)
    signs = [p.detach().clone() for p in params]
    strides = [p.stride() for p in params]
    for _ in range(3):
        for p, sign in zip(params, signs, strict=True):
            p.grad = sign.clone()  # every element moves against its own sign: a mixed-up layout would show
        optimizer.step()
    assert [p.stride() for p in params] == strides
    assert [m.stride() for m in main_params(optimizer)][:2] == strides[:2]  # else multi-tensor kernels go one by one
    for p, sign in zip(params, signs, strict=True):
        assert bool((((p - sign) * sign) <= 0).all())


# ---- schedulers


@every_form
@pytest.mark.parametrize("before", [True, False], ids=["scheduler-first", "wrap-first"])
def test_schedulers(form, before):
    """Warnings are errors: torch warns if it believes that `step` was not called or was replaced."""
    model = net().bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    stepped_on = []
    optimizer.register_step_post_hook(lambda o, *_: stepped_on.append(o.param_groups[0]["params"][0].dtype))
    if not before:
        add_masters(optimizer, form)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    if before:
        add_masters(optimizer, form)
    start = [p.detach().clone() for p in model.parameters()]
    for i in range(3):
        train(model, optimizer, range(i, i + 1))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (i + 1)
    assert not equal(start, list(model.parameters()))
    assert stepped_on == [torch.float32] * 3


# ---- hooks


@every_form
@pytest.mark.parametrize("loaded", [False, True])
def test_step_hooks_fire_once(form, loaded):
    model, optimizer = wrapped(ADAMW, form)
    train(model, optimizer, range(1))
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: calls.append("global")),
    ]
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1))
    for handle in handles:
        handle.remove()
    assert sorted(calls) == ["global", "post", "pre"]


@every_exact_form
def test_what_a_post_hook_does_to_masters_reaches_the_weights(form):
    p = half(1.0, -1.0)
    optimizer = add_masters(optim.SGD([p], lr=1e-3), form)
    optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0]["params"][0].data.clamp_(min=0.5))
    step(optimizer, p)
    assert torch.equal(p, torch.tensor([1.0, 0.5]).bfloat16())


# ---- weights edited from outside
