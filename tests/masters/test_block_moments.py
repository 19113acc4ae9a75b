"""Moments of 8 bits and updates during the backward pass, without Lightning: values, memory, state dicts, copies."""

import copy
import gc
import itertools
import pickle
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowprec.masters import moments
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params, remove_masters
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.masters.weights import cast_parameters
from tests.masters.master_loops import equal, through_file

FORMS, MOMENTS, UPDATES = ("fp32", "remainder", "stochastic"), ("fp32", "8bit"), ("step", "backward")
ALL = list(itertools.product(FORMS, MOMENTS, UPDATES))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 96, bias=False))


def groups_of(model, **options):
    """The last weight is not decayed."""
    *first, last = model.parameters()
    return torch.optim.AdamW(
        [{"params": first}, {"params": [last], "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2, weight_decay=0.1, **options
    )


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


def test_float32_everywhere_is_torchs_adamw_on_the_same_gradients():
    """Groups, weight decay, a scheduler, and a parameter that is frozen for two steps: bit for bit, in both updates."""
    runs = {}
    for update in UPDATES:
        model, optimizer = wrapped(update=update)
        reference = [p.clone().detach() for p in net().parameters()]
        stock = groups_of(nn.ParameterList(reference))
        reference = list(itertools.chain.from_iterable(group["params"] for group in stock.param_groups))
        grads = {}
        for index, p in enumerate(model.parameters()):
            p.register_hook(lambda grad, index=index, grads=grads: grads.__setitem__(index, grad.float()))
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (optimizer, stock)]
        frozen = model[0].weight
        for step in range(7):
            frozen.requires_grad_(step not in (2, 3))
            grads.clear()
            train(model, optimizer, [step])
            for index, p in enumerate(reference):
                p.grad = grads.get(index)
            stock.step()
            for scheduler in schedulers:
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == stock.param_groups[0]["lr"]
        assert equal(masters_of(optimizer), [p.detach() for p in reference])
        assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [5, 7, 7]
        assert equal([p.detach() for p in model.parameters()], [p.detach().bfloat16() for p in reference])
        runs[update] = optimizer.state_dict()
    assert equal(runs["step"], runs["backward"])


def calls_of_a_backward(count):
    """Calls, of functions in C too, of a backward that updates ``count`` parameters."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count))).bfloat16()
    config = MasterConfig(form="remainder", moments="8bit", update="backward")
    optimizer = add_masters(torch.optim.AdamW(model.parameters()), config)
    model(torch.ones(2, 4).bfloat16()).float().sum().backward()
    optimizer.step()  # makes the state
    loss = model(torch.ones(2, 4).bfloat16()).float().sum()
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    loss.backward()
    sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_the_work_of_a_backward_is_linear_in_the_number_of_parameters():
    assert calls_of_a_backward(256) < 4.2 * calls_of_a_backward(64)


def test_a_parameter_that_thaws_in_the_middle_is_hooked_from_the_next_step_on():
    model = net().bfloat16()
    model[0].weight.requires_grad_(False)
    optimizer = add_masters(groups_of(model), MasterConfig(update="backward"))
    train(model, optimizer, range(1))
    model[0].weight.requires_grad_(True)
    before = model[0].weight.detach().clone()
    model(batch(1)).float().square().mean().backward()
    assert model[2].weight.grad is None
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    model(batch(2)).float().square().mean().backward()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_the_state_between_steps_is_what_it_says(form):
    model, optimizer = wrapped(form=form, moments="8bit", update="backward")
    model(batch(0)).float().square().mean().backward()
    assert all(p.grad is None for p in model.parameters()), "freed"
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


@pytest.mark.parametrize(("form", "moments", "update"), ALL)
def test_resumes_bit_for_bit_and_is_the_same_every_time(form, moments, update):
    config = {"form": form, "moments": moments, "update": update}
    model, optimizer = wrapped(**config)
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, 6))
    again, resumed = wrapped(**config)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, range(3, 6))
    assert equal(again.state_dict(), model.state_dict())
    assert equal(resumed.state_dict(), optimizer.state_dict())
    other, whole = wrapped(**config)
    train(other, whole, range(6))
    assert equal(whole.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(("form", "moments"), [("remainder", "8bit"), ("stochastic", "8bit"), ("fp32", "8bit")])
def test_copies_and_pickles_train_on(form, moments):
    model, optimizer = wrapped(form=form, moments=moments, update="backward")
    train(model, optimizer, range(2))
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    before = [p.detach().clone() for p in model.parameters()]
    for other, its in copies:
        train(other, its, range(2, 4))
        assert all(p.grad is None for p in other.parameters())
    assert equal([p.detach() for p in model.parameters()], before), "the copies have hooks of their own"
    train(model, optimizer, range(2, 4))
    for other, its in copies:
        assert equal(other.state_dict(), model.state_dict())
        assert equal(its.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    "source", [("remainder", "8bit", "backward"), ("stochastic", "8bit", "step"), ("fp32", "8bit", "step")]
)
@pytest.mark.parametrize(
    "target",
    [
        ("fp32", "fp32", "step"),
        ("remainder", "fp32", "step"),
        ("stochastic", "fp32", "step"),
        ("remainder", "8bit", "backward"),
        ("fp32", "8bit", "backward"),
        ("stochastic", "8bit", "step"),
    ],
)
def test_state_dicts_load_into_every_other_form(source, target):
    def config(names):
        return dict(zip(("form", "moments", "update"), names, strict=True))

    model, optimizer = wrapped(**config(source))
    train(model, optimizer, range(3))
    other, loaded = wrapped(**config(target))
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    if "stochastic" not in (source[0], target[0]):
        assert equal(masters_of(loaded), masters_of(optimizer)), "no form loses anything of the masters"
    if target[1] == "fp32":
        exact = add_masters(groups_of(other), MasterConfig())
        exact.load_state_dict(optimizer.state_dict())
        assert equal(loaded.state_dict()["state"][0]["exp_avg_sq"], exact.state_dict()["state"][0]["exp_avg_sq"])
    train(other, loaded, range(3, 5))
    back, again = wrapped(**config(source))
    back.load_state_dict(other.state_dict())
    again.load_state_dict(through_file(loaded.state_dict()))
    train(back, again, range(5, 6))
    assert all(p.isfinite().all() for p in back.parameters())
    assert int(again.state[back[0].weight]["step"]) == 6


def test_torchs_own_adamw_does_not_go_on_from_codes():
    model, optimizer = wrapped(form="remainder", moments="8bit", update="backward")
    train(model, optimizer, range(1))
    plain = net()
    stock = groups_of(plain)
    stock.load_state_dict(optimizer.state_dict())
    plain(batch(0).float()).square().mean().backward()
    with pytest.raises(KeyError, match="exp_avg"):
        stock.step()


def test_without_masters_the_moments_are_decoded_and_the_hooks_are_gone():
    model, optimizer = wrapped(form="remainder", moments="8bit", update="backward")
    train(model, optimizer, range(2))
    remove_masters(optimizer)
    assert registry_of(optimizer) is None
    state = optimizer.state[model[0].weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"].dtype == torch.float32
    model(batch(0)).float().square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_optimizer_that_is_gone_updates_nothing():
    model, optimizer = wrapped(update="backward")
    del optimizer
    gc.collect()
    model(batch(0)).float().square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_parameter_without_gradient_is_neither_decayed_nor_counted_and_a_tied_one_steps_once():
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False), "c": nn.Linear(64, 64)}
    )
    model["b"].weight = model["a"].weight
    originals = cast_parameters(model, torch.bfloat16, keep=True)
    before = model["c"].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    add_masters(optimizer, MasterConfig(form="remainder", moments="8bit", update="backward"), values=originals)
    for step in range(3):
        model["b"](model["a"](batch(step))).float().square().mean().backward()
        optimizer.step()
    assert int(optimizer.state[model["a"].weight]["step"]) == 3
    assert torch.equal(model["c"].weight, before)
    assert model["c"].weight not in optimizer.state


def test_closures_run_once_and_return_the_loss():
    runs = []
    for closure in (False, True):
        model, optimizer = wrapped(form="remainder", moments="8bit", update="backward")
        for step in range(3):
            calls = []

            def evaluate(step=step, model=model, calls=calls):
                calls.append(step)
                loss = model(batch(step)).float().square().mean()
                loss.backward()
                return loss

            if closure:
                assert optimizer.step(evaluate).item() > 0
            else:
                evaluate()
                optimizer.step()
            assert calls == [step]
        runs.append(optimizer.state_dict())
    assert equal(*runs)


def test_hooks_of_steps_and_other_optimizers_are_refused():
    own = type("Own", (torch.optim.SGD,), {})
    with pytest.raises(
        ValueError, match=r"`update='backward'` steps one parameter at a time.*Use another optimizer, or"
    ):
        add_masters(own(net().parameters(), lr=1.0), MasterConfig(update="backward"))
    _, optimizer = wrapped(update="backward")
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="must see all of them at once"):
        optimizer.step()


def test_a_learning_rate_that_is_set_too_late_is_warned_of_once(recwarn):
    model, optimizer = wrapped(update="backward")
    for step in range(3):
        model(batch(step)).float().square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    assert [str(w.message)[:70] for w in recwarn] == [
        "A learning rate was changed between `backward` and `optimizer.step()`."
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def test_clip_tensor():
    """loss = w . g, so that g is the gradient, exactly; SGD with a rate of 1 moves the weights by minus clipped g."""
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])  # norms 5 and 12
    params = nn.ParameterList([torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16()])
    optimizer = add_masters(sgd(params), MasterConfig(update="backward", clip_tensor=6.0))
    sum((p.float() * g).sum() for p, g in zip(params, (first, second), strict=True)).backward()
    optimizer.step()
    a, b = masters_of(optimizer)
    assert torch.equal(-a, first), "5 is below 6"
    torch.testing.assert_close(-b, second / 2)


def test_sparse_gradients_are_clipped_too():
    """Rows 0 and 1 get gradients of (3, 0) and (0, 4), row 0 in two halves: norm 5."""
    table = nn.Embedding(4, 2, sparse=True).bfloat16()
    table.weight.data.zero_()
    optimizer = add_masters(sgd(table), MasterConfig(update="backward", clip_tensor=1.0))
    (table(torch.tensor([0, 0, 1])).float() * torch.tensor([[1.5, 0.0], [1.5, 0.0], [0.0, 4.0]])).sum().backward()
    optimizer.step()
    expected = -0.2 * torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(masters_of(optimizer)[0], expected)


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
