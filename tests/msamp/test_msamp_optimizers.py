"""Which optimizers MSAMP takes, in place, and which it refuses."""

import copy

import pytest
import torch

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import ScaledAdamW, values_of
from tests.msamp.msamp_runs import CHATTER, LEVELS, Batches, Net, fit, in_fabric

every_level = pytest.mark.parametrize("level", LEVELS)
pytestmark = pytest.mark.filterwarnings(CHATTER)


def test_an_optimizer_is_taken_in_place_with_scheduler_hooks_groups_and_state():
    module = Net()
    groups = [{"params": [module.first.weight, module.second.weight], "weight_decay": 0.1}]
    groups.append({"params": [p for p in module.parameters() if p.ndim == 1], "lr": 1e-3})
    optimizer = torch.optim.AdamW([*groups, {"params": [module.head.weight]}], lr=1e-2, betas=(0.8, 0.9))
    for p in module.parameters():  # it has stepped before
        p.grad = torch.ones_like(p)
    optimizer.step()
    before, moments = copy.deepcopy(optimizer.param_groups), optimizer.state[module.first.weight]["exp_avg"].clone()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fabric, wrapped, shown = in_fabric(module, optimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, ScaledAdamW)
    state = optimizer.state[module.first.weight]
    assert state["exp_avg"].dtype == torch.float8_e4m3fn
    assert torch.allclose(state["exp_avg"].float() / state["exp_avg_scale"], moments, rtol=2**-4)
    assert state["step"] == 1
    for _ in range(2):
        fabric.backward(wrapped(Batches()[0]).square().mean())
        shown.step()
        scheduler.step()
        shown.zero_grad()
    assert calls == ["before", "after"] * 2
    for old, new in zip(before, optimizer.param_groups, strict=True):
        assert new["lr"] == old["lr"] / 4
        assert (new["betas"], new["weight_decay"]) == (old["betas"], old["weight_decay"])
    twin_module, twin = copy.deepcopy((module, optimizer))
    assert type(twin) is type(optimizer)
    assert type(twin.state[twin_module.first.weight]["step"]) is int  # a tensor's powers would be rounded to float32
    for model, own in ((module, optimizer), (twin_module, twin)):
        own.zero_grad()
        model(Batches()[1]).square().mean().backward()
        own.param_groups[0]["lr"] = 1.0  # a step that needs another scale
        before = values_of(twin_module.first.weight)
        own.step()
        assert torch.equal(values_of(twin_module.first.weight), before) == (model is module), "scales of its own"
    assert torch.equal(values_of(twin_module.first.weight), values_of(module.first.weight))


def with_a_step_of_its_own(ps):
    optimizer = torch.optim.AdamW(ps)
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), ValueError, "`amsgrad=True` of AdamW"),
        (lambda ps: torch.optim.AdamW(ps, maximize=True), ValueError, "`maximize=True` of AdamW"),
        (lambda ps: ScaledAdamW(ps, level="O1"), ValueError, "has `level='O1'`; expected 'O2'"),
        (torch.optim.SGD, TypeError, r"SGD cannot step.*AdamW, .*Adam, .*ScaledAdamW"),
        (type("Own", (torch.optim.AdamW,), {}), TypeError, "Own cannot step"),
        (with_a_step_of_its_own, RuntimeError, "instance attribute `step` of this AdamW hides its class"),
    ],
)
def test_what_it_cannot_do_raises(make, error, message):
    with pytest.raises(error, match=message):
        fit(MSAMP("O2"), Net(lambda net: make(list(net.parameters()))))
    module = Net()
    with pytest.raises(error, match=message):
        in_fabric(module, make(list(module.parameters())))


def test_any_optimizer_may_hold_what_is_not_kept_as_codes():
    module = Net()
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    fabric, wrapped, shown = in_fabric(module, optimizer)
    fabric.backward(wrapped(Batches()[0]).square().mean())
    shown.step()
    module.first.requires_grad_(True)
    fabric.backward(wrapped(Batches()[0]).square().mean())
    with pytest.raises(TypeError, match="Adagrad cannot step"):
        shown.step()
