"""The kernel's table of a group is made anew when something that it was made of is another one."""

import copy

import pytest
import torch
from torch import optim

from lightning_lowprec.masters import kernel_step
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import add_masters
from tests.triton.test_one_pass import ULPS, net, train


def other_memory(model, optimizer):
    for entry in optimizer.state.values():
        entry["exp_avg"].data = entry["exp_avg"].clone().mul_(2)
    model[0].weight.data = model[0].weight.detach().clone()


def other_state(model, optimizer):
    for p in model.parameters():
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].clone().mul_(4)
        optimizer.state[p]["step"] = optimizer.state[p]["step"] + 3


def other_counts(model, optimizer):
    """Of one parameter in place, of another in other memory; the counts of a group are one tensor."""
    first, second, *_ = optimizer.state.values()
    first["step"].add_(5)
    second["step"].data = second["step"] + 7


def no_gradient(model, optimizer):
    model[0].bias.requires_grad_(False)


def another_gradient(model, optimizer):
    model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.t().contiguous().t()))


def a_rate_for_one(model, optimizer):
    group = optimizer.param_groups[0]
    last = group["params"].pop()
    optimizer.param_groups.append({**group, "params": [last], "lr": 0.1})


def loaded(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].neg_()
    optimizer.load_state_dict(state)


CHANGES = (other_memory, other_state, other_counts, no_gradient, another_gradient, a_rate_for_one, loaded)


@pytest.mark.parametrize("change", [*CHANGES, lambda *_: None])
def test_a_change_between_two_steps_reaches_the_kernel(change, launches, monkeypatch):
    found = []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(kernel_step, "DEVICES", devices)
        monkeypatch.setattr(masters_step, "DEVICES", devices)
        model = net()
        optimizer = add_masters(optim.AdamW(model.parameters(), lr=1e-2), "remainder")
        train(model, optimizer, 3)
        change(model, optimizer)
        found.append(train(model, optimizer, 2))
    assert launches
    for entry, expected in zip(found[0].values(), found[1].values(), strict=True):
        for name, value in expected.items():
            limit = ULPS * max(1e-3, value.abs().max().item())
            torch.testing.assert_close(entry[name], value, rtol=0, atol=limit)


def test_the_counts_of_steps_are_those_of_torch_in_copies_and_files_too(tmp_path):
    model = net()
    optimizer = add_masters(optim.AdamW(model.parameters(), lr=1e-2), "remainder")
    train(model, optimizer, 3)
    held = [entry["step"] for entry in optimizer.state.values()]
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copied = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    assert [step.item() for step in held] == [5.0] * len(held)
    for state in (torch.load(tmp_path / "state.pt"), copied):
        optimizer.load_state_dict(state)
        train(model, optimizer, 1)
        assert [entry["step"].item() for entry in optimizer.state.values()] == [4.0] * len(held)
    assert [step.item() for step in held] == [5.0] * len(held), "of the state before"
