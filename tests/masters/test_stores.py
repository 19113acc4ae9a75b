"""What the four stores promise: small updates add up, memory, no cost per parameter, replicas and resume agree."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, move_grads_to_masters
from lightning_lowprec.masters.stores import StochasticStore
from lightning_lowprec.masters.weights import cast_parameters
from tests.masters.master_loops import buffers_of, masters_of, through_file, train, wrapped

FORMS = ("fp32", "remainder", "stochastic")


# ---- small updates


def five_steps_down(p, optimizer):
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p


def test_plain_bf16_loses_small_updates():
    p = nn.Parameter(torch.ones(4096).bfloat16())
    assert bool((five_steps_down(p, optim.SGD([p], lr=1e-3)) == 1.0).all())


@pytest.mark.parametrize("form", ["fp32", "remainder"])
def test_masters_keep_small_updates(form):
    p = nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=1e-3), form)
    weight = five_steps_down(p, optimizer)
    assert torch.allclose(masters_of(optimizer)[0], torch.full((4096,), 0.995), rtol=0, atol=1e-6)
    assert bool((weight == torch.tensor(0.995).bfloat16()).all())


def test_stochastic_rounding_keeps_small_updates_on_average():
    p = nn.Parameter(torch.ones(4096).bfloat16())
    weight = five_steps_down(p, add_masters(optim.SGD([p], lr=1e-3), "stochastic"))
    # the grid below 1 is 2^-8 wide: at most 5 roundings of variance 2^-18 each per weight
    assert abs(weight.float().mean().item() - 0.995) < 5 * (5 * 2.0**-18 / 4096) ** 0.5


def regression(dtype, form):
    """MSE after AdamW at lr 1e-4, which moves a bf16 weight by less than half its step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, generator=generator)
    y = x @ torch.randn(32, 8, generator=generator) / 32**0.5 + 0.1 * torch.randn(256, 8, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    with torch.no_grad():
        model.weight.copy_(torch.randn(8, 32, generator=generator) / 32**0.5)
    originals = {} if dtype is None else cast_parameters(model, dtype, keep=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    if form is not None:
        add_masters(optimizer, form, values=originals)
    for step in range(1200):
        rows = slice(32 * (step % 8), 32 * (step % 8) + 32)
        optimizer.zero_grad()
        weight, bias = model.weight.float(), model.bias.float()
        (x[rows] @ weight.T + bias - y[rows]).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return (x @ model.weight.float().T + model.bias.float() - y).pow(2).mean().item()


@pytest.mark.slow
def test_regression_with_small_updates_learns_as_float32():
    exact = regression(None, None)
    loss = {form: regression(torch.bfloat16, form) for form in FORMS}
    plain = regression(torch.bfloat16, None)
    print({"float32": exact, **loss, "plain bf16": plain})
    assert loss["fp32"] == loss["remainder"]
    assert loss["fp32"] == pytest.approx(exact, rel=5e-3)
    assert loss["stochastic"] == pytest.approx(exact, rel=5e-3)
    assert plain > 1.1 * exact


# ---- replicas and resume


def test_replicas_agree_whatever_their_generators():
    weights = []
    for seed in (1, 2):
        model, optimizer = wrapped(partial(optim.AdamW, lr=1e-3), "stochastic")
        torch.manual_seed(seed)
        train(model, optimizer, range(8))
        assert torch.initial_seed() == seed
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("model_first", [True, False])
def test_stochastic_resume_is_exact_without_generator_state(model_first):
    make = partial(optim.AdamW, lr=1e-3)
    straight, optimizer = wrapped(make, "stochastic")
    train(straight, optimizer, range(8))
    model, optimizer = wrapped(make, "stochastic")
    train(model, optimizer, range(4))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = wrapped(make, "stochastic", seed=5)
    loads = [lambda: model.load_state_dict(saved["model"]), lambda: optimizer.load_state_dict(saved["optimizer"])]
    for load in loads if model_first else reversed(loads):
        load()
    train(model, optimizer, range(4, 8))
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_seed_of_its_own_rounds_differently():
    weights = []
    for seed in (0, 1):
        model, optimizer = wrapped(partial(optim.AdamW, lr=1e-3), MasterConfig(form="stochastic", seed=seed))
        train(model, optimizer, range(4))
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert not torch.equal(*weights)


# ---- memory


def storages(*tensors):
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


class Peak(TorchDispatchMode):
    """The most bytes that tensors which an op returned, or that are passed in, held at once."""

    def __init__(self, *held):
        super().__init__()
        self.known = [weakref.ref(t) for t in held]
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.known.append(weakref.ref(t))
        alive = [t for t in (ref() for ref in self.known) if t is not None]
        self.bytes = max(self.bytes, sum(s.nbytes() for s in storages(*alive).values()))
        return out


#                weight, bf16 gradient, store, two moments
AT_REST = {
    "fp32": 2 + 2 + 4 + 8,
    "remainder": 2 + 2 + 2 + 8,
    "stochastic": 2 + 2 + 0 + 8,
}
#                weight, store, float32 value, float32 gradient, float32 moments, AdamW's own temporary
AT_PEAK = {
    "fp32": 2 + 0 + 4 + 4 + 8 + 4,
    "remainder": 2 + 2 + 4 + 4 + 8 + 4,
    "stochastic": 2 + 0 + 4 + 4 + 8 + 4,
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_per_parameter(form):
    """At rest (with gradients, before the step), and at the peak of the step."""
    n = 1 << 16
    params = [nn.Parameter(torch.randn(256, n // 512).bfloat16()) for _ in range(2)]
    optimizer = add_masters(optim.AdamW(params, foreach=True), form)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = torch.randn_like(p)
    state = [v for p in params for v in optimizer.state[p].values() if v.dim()]
    held = buffers_of(optimizer)
    tensors = [*params, *(p.grad for p in params), *state, *held]
    at_rest = sum(s.nbytes() for s in storages(*tensors).values()) / n
    with Peak(*tensors) as peak:
        del p, tensors
        optimizer.step()
    assert at_rest == AT_REST[form]
    assert peak.bytes / n == AT_PEAK[form]


# ---- cost


class Count(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += func not in (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default)  # views are free
        return func(*args, **(kwargs or {}))


def ops_of_a_step(tensors, form):
    """aten ops of one foreach AdamW step beyond those of the same optimizer on float32 parameters."""
    counts = []
    for dtype in (torch.bfloat16, torch.float32):
        params = [nn.Parameter(torch.randn(4, 3).to(dtype)) for _ in range(tensors)]
        optimizer = optim.AdamW(params, foreach=True)
        if dtype is torch.bfloat16:
            add_masters(optimizer, form)
        for counted in (False, False, True):
            for p in params:
                p.grad = torch.ones_like(p)
            with Count() as count:
                if dtype is torch.bfloat16:
                    move_grads_to_masters(optimizer)
                optimizer.step()
            if counted:
                counts.append(count.ops)
    return counts[0] - counts[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_costs_the_same_number_of_calls_for_any_number_of_parameters(form):
    few, many = (ops_of_a_step(n, form) for n in (2, 40))
    print(form, few)
    assert few == many
    assert few < 100


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
