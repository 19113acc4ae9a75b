"""Moments of 8 bits, without Lightning: values, memory, state dicts, copies."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters import moments
from lightning_lowprec.masters.optimizer import add_masters, main_params
from lightning_lowprec.masters.weights import cast_parameters
from tests.masters.master_loops import equal, every_form


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 96, bias=False))


def groups_of(model, **options):
    """The last weight is not decayed."""
    *first, last = model.parameters()
    return torch.optim.AdamW([{"params": first}, {"params": [last], "weight_decay": 0.0}], lr=1e-2, **options)


def wrapped(make=groups_of, **config):
    model = net()
    originals = cast_parameters(model, torch.bfloat16, keep=True)
    return model, add_masters(make(model), MasterConfig(**config), values=originals)


def batch(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).float().square().mean().backward()
        optimizer.step()


def masters_of(optimizer):
    return [value.detach().clone() for value in main_params(optimizer)]


@every_form
def test_the_state_between_steps_is_what_it_says(form):
    model, optimizer = wrapped(form=form, moments="8bit")
    model(batch(0)).float().square().mean().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert {name: value.dtype for name, value in state.items()} == {
        "step": torch.float32,
        "exp_avg_codes": torch.float8_e4m3fn, "exp_avg_exponents": torch.uint8,
        "exp_avg_sq_codes": torch.uint8, "exp_avg_sq_exponents": torch.uint8,
    }  # fmt: skip
    assert state["exp_avg_codes"].shape == (64, 64)
    assert state["exp_avg_exponents"].shape == (64, 1)
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32, "one dimension"
    held = [store.flat.untyped_storage().nbytes() for store in optimizer._masters.stores]
    assert sum(held) == (0 if form != "fp32" else 4 * sum(p.numel() for p in model.parameters()))
    extra = sum(store.remainder.nbytes for store in optimizer._masters.stores if form == "remainder")
    assert extra == (2 * sum(p.numel() for p in model.parameters()) if form == "remainder" else 0)


def test_moments_of_8_bits_follow_adams():
    """Both moments after 40 steps against float32 ones on the same gradients; the second decays, too."""
    torch.manual_seed(0)
    coded, exact = nn.Parameter(torch.zeros(64, 64).bfloat16()), nn.Parameter(torch.zeros(64, 64))
    make = lambda p: torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95))  # noqa: E731
    ours, stock = add_masters(make(coded), MasterConfig(moments="8bit")), make(exact)
    for step in range(40):
        grad = torch.randn(64, 64) * torch.logspace(-3, 0, 64) * (1.0 if step < 5 else 0.01)
        coded.grad, exact.grad = grad.bfloat16(), grad.bfloat16().float()
        ours.step()
        stock.step()
    found = add_masters(make(nn.Parameter(coded.detach().clone())), MasterConfig())
    found.load_state_dict(ours.state_dict())
    state, expected = next(iter(found.state.values())), stock.state[exact]
    # A step of rounding is 0.09 of a number on average, its deviation 0.4 of that: 0.037. The second moments shrink in
    # 35 steps, which all add to the error: 0.037 * sqrt(35) = 0.22. The first moments forget an error in 10 steps, but
    # their gradients have changing signs.
    for name in ("exp_avg", "exp_avg_sq"):
        relative = (state[name] - expected[name]).norm(dim=0) / expected[name].norm(dim=0)
        assert relative.median() < 0.3
    assert (state["exp_avg_sq"] / expected["exp_avg_sq"]).mean().item() == pytest.approx(1.0, abs=0.02), "no drift"
    master = next(main_params(ours)).detach()
    assert torch.nn.functional.cosine_similarity(master.flatten(), exact.detach().flatten(), dim=0) > 0.99


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.Adam,
        partial(torch.optim.AdamW, amsgrad=True),
        partial(torch.optim.RMSprop, centered=True, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.Muon,
    ],
    ids=lambda make: getattr(make, "func", make).__name__,
)
def test_every_coded_state_of_an_optimizer_is_that_of_float32(make):
    """After a step, whose gradients have both signs: rounding makes a difference of 0.037."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 64).bfloat16()
    coded, exact = nn.Parameter(torch.zeros(64, 64).bfloat16()), nn.Parameter(torch.zeros(64, 64))
    ours, stock = add_masters(make([coded], lr=1e-3), MasterConfig(moments="8bit")), make([exact], lr=1e-3)
    coded.grad, exact.grad = gradient, gradient.float()
    ours.step()
    stock.step()
    assert any(name.endswith("_codes") for name in ours.state[coded])
    found = add_masters(make([nn.Parameter(coded.detach().clone())], lr=1e-3), MasterConfig())
    found.load_state_dict(ours.state_dict())
    state, expected = next(iter(found.state.values())), stock.state[exact]
    for name, value in expected.items():
        if torch.is_tensor(value) and value.shape == exact.shape:
            assert (state[name] - value).norm() <= 0.06 * value.norm(), name


@pytest.mark.parametrize(("form", "moments"), [("remainder", "fp32"), ("stochastic", "8bit"), ("fp32", "8bit")])
def test_copies_and_pickles_train_on(form, moments):
    model, optimizer = wrapped(form=form, moments=moments)
    train(model, optimizer, range(2))
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    before = [p.detach().clone() for p in model.parameters()]
    for other, its in copies:
        train(other, its, range(2, 4))
    assert equal([p.detach() for p in model.parameters()], before), "the copies have weights of their own"
    train(model, optimizer, range(2, 4))
    for other, its in copies:
        assert equal(other.state_dict(), model.state_dict())
        assert equal(its.state_dict()["state"], optimizer.state_dict()["state"])


def test_the_codes_of_a_loaded_state_dict_are_not_written_to():
    """Torch shares its own float32 moments, and the count of steps, with the state dict."""
    model, optimizer = wrapped(form="remainder", moments="8bit")
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    other, loaded = wrapped(form="remainder", moments="8bit")
    loaded.load_state_dict(state)
    train(other, loaded, range(2, 4))
    assert "exp_avg_codes" in state["state"][0]
    for name in ("exp_avg_codes", "exp_avg_exponents", "exp_avg_sq_codes", "exp_avg_sq_exponents"):
        assert equal(state["state"][0][name], kept["state"][0][name]), name


def test_a_parameter_without_gradient_is_neither_decayed_nor_counted_and_a_tied_one_steps_once():
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False), "c": nn.Linear(64, 64)}
    )
    model["b"].weight = model["a"].weight
    for p in model.parameters():  # the cast rounds no value halfway between two of bf16 otherwise than a step does
        p.data.copy_(p.data.bfloat16())
    originals = cast_parameters(model, torch.bfloat16, keep=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    add_masters(optimizer, MasterConfig(form="remainder", moments="8bit"), values=originals)
    before = model["c"].weight.detach().clone()
    for step in range(3):
        model["b"](model["a"](batch(step))).float().square().mean().backward()
        optimizer.step()
    assert int(optimizer.state[model["a"].weight]["step"]) == 3
    assert torch.equal(model["c"].weight, before)
    assert model["c"].weight not in optimizer.state


class WithAnAverageOfWeights(torch.optim.SGD):
    """An optimizer of a user, whose state 8 bits would spoil."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("z", p.detach().clone()).lerp_(p.detach(), 0.1)


@pytest.mark.parametrize(
    ("make", "kept", "coded"),
    [
        (torch.optim.ASGD, {"ax"}, set()),
        (torch.optim.Rprop, {"prev", "step_size"}, set()),
        (partial(WithAnAverageOfWeights, momentum=0.9), {"z"}, {"momentum_buffer"}),
        (
            partial(torch.optim.RMSprop, momentum=0.9, centered=True),
            set(),
            {"momentum_buffer", "square_avg", "grad_avg"},
        ),
        (torch.optim.Adafactor, set(), set()),
    ],
    ids=["ASGD", "Rprop", "a user's", "RMSprop", "Adafactor"],
)
def test_what_is_not_known_to_be_an_average_of_gradients_stays_float32_with_a_warning(make, kept, coded):
    moments._warn_of_float32.cache_clear()
    model, optimizer = wrapped(lambda m: make([m[2].weight]), form="remainder", moments="8bit")

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).float().square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step(closure)
    named = ", ".join(f"`{name}`" for name in sorted(kept))
    assert [str(w.message).split(" stays float32")[0] for w in caught] == (
        [f"`moments='8bit'`: the optimizer's state {named}"] if kept else []
    )
    state = optimizer.state[model[2].weight]
    assert {name.removesuffix("_codes") for name in state if name.endswith("_codes")} == coded
    assert all(state[name].dtype == torch.float32 for name in kept)


@pytest.mark.parametrize("form", ["fp32", None], ids=["masters", "float32 weights"])
def test_norms_of_updates_in_the_backward_pass_leave_the_groups_with_a_log_line(form, caplog):
    """Checkpoints of an earlier form of this package have them in their groups."""
    model, optimizer = wrapped(form="remainder", moments="8bit")
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"clip_norm": 1.0, "last_norm": 3.0}
    other = groups_of(net())
    if form is None:
        moments.decode_on_load(other)
    else:
        _, other = wrapped(form=form)
    with caplog.at_level("INFO"):
        other.load_state_dict(saved)
    assert "updated weights in the backward pass" in caplog.text
    assert not {"clip_norm", "last_norm"} & other.param_groups[0].keys()
    assert saved["param_groups"][0]["last_norm"] == 3.0, "the caller's"


def test_a_users_group_option_stays():
    _, optimizer = wrapped(form="remainder", moments="8bit")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["clip_norm"] = 1.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["clip_norm"] == 1.0


def test_remainders_of_8_bits_are_the_upper_half_of_16():
    """1 + 2**-15 is the bf16 1.0 and 0x0100 of a last place of 2**-23: as an int8, 1."""
    _, optimizer = wrapped(lambda m: torch.optim.SGD([m[2].weight]), form="remainder")
    weight = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.fill_(1.0)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"master_remainder": torch.ones(weight.shape, dtype=torch.int8)}}
    optimizer.load_state_dict(saved)
    assert bool((masters_of(optimizer)[0] == 1.0 + 2.0**-15).all())


class OwnSGD(torch.optim.SGD):
    """An optimizer of a user."""


def test_two_steps_of_a_users_optimizer_round_by_other_random_bits():
    """An update of half a step of bf16 moves about half of the weights, and not the same ones twice."""
    weight, moved = nn.Parameter(torch.ones(64, 64).bfloat16()), []
    optimizer = add_masters(OwnSGD([weight], lr=1.0), MasterConfig(form="stochastic"))
    for _ in range(2):
        weight.data.fill_(1.0)
        weight.grad = torch.full_like(weight, -(2.0**-8))
        optimizer.step()
        moved.append(weight.detach() > 1)
    assert not torch.equal(*moved)
    assert all(0.4 < some.float().mean() < 0.6 for some in moved)
