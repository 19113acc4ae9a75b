"""The kernel steps as torch's optimizers do on float32 masters, in every form, with 8-bit moments, from any state."""

import copy
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch import nn, optim

from lightning_lowprec import HalfMixed
from lightning_lowprec.masters import kernel_step, registry
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params, move_grads_to_masters

FORMS = ("fp32", "remainder", "stochastic")
OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.4, 0.9), maximize=True),
    "adam-decoupled-tensor-lr": lambda p: optim.Adam(
        p, lr=torch.tensor(1e-2), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adamw-capturable": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
}
MAX_NORM = 0.05
ULPS = 4 * 2.0**-23
"""float32 arithmetic with and without fused multiply-adds: a few roundings apart, of the largest value involved."""


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(dtype)


X = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))


def backward(model):
    (model(X.to(model[0].weight.dtype)) - 1).float().square().mean().backward()


def train(model, optimizer, steps, clip=False):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        if clip and masters_step.defers(optimizer):
            masters_step.clip_by_norm(optimizer, MAX_NORM)
        elif clip:
            move_grads_to_masters(optimizer)
            nn.utils.clip_grad_norm_(list(main_params(optimizer)), MAX_NORM)
        optimizer.step()
    return optimizer.state_dict()["state"]


def both_ways(monkeypatch, run):
    found = []
    for devices in ({"cpu"}, set()):
        for module in (kernel_step, masters_step):
            monkeypatch.setattr(module, "DEVICES", devices)
        found.append(run())
    return found


def assert_near(ours, theirs, rtol=0.0, atol=None):
    for entry, expected in zip(ours.values(), theirs.values(), strict=True):
        assert entry.keys() == expected.keys()
        for name, value in expected.items():
            assert entry[name].dtype == value.dtype
            limit = ULPS * max(1e-3, value.abs().max().item()) if atol is None else atol
            torch.testing.assert_close(entry[name], value, rtol=rtol, atol=limit)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_steps_as_torch_does(form, make, clip, launches, monkeypatch):
    def run():
        model = net()
        return model, train(model, add_masters(OPTIMIZERS[make](model.parameters()), form), 4, clip)

    (model, ours), (reference, theirs) = both_ways(monkeypatch, run)
    first = 0 if make == "sgd" else 1  # torch makes the state in the first step
    assert [len(rows) for rows in launches] == [4] * (4 - first), "one launch per step"
    assert_near(ours, theirs)
    if form == "stochastic":
        different = sum((a != b).sum().item() for a, b in zip(model.parameters(), reference.parameters(), strict=True))
        assert different <= 2


def test_random_bits_that_begin_anew_inside_a_block_are_those_of_torchs_operations(monkeypatch):
    def run():  # bits begin anew every 2**22 positions; the updates are exact, and half way between two weights
        before, weight = (nn.Parameter(torch.ones(size).bfloat16()) for size in (2**22 - 1000, 2048))
        optimizer = add_masters(optim.SGD([before, weight], lr=1.0), "stochastic")
        for _ in range(8):
            weight.grad = torch.full_like(weight, 2.0**-9)
            optimizer.step()
        return weight

    assert torch.equal(*both_ways(monkeypatch, run))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy computes here
@pytest.mark.parametrize("form", FORMS)
def test_values_at_the_edge(form):
    p = nn.Parameter(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 3.3e38, 0.5]).bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=2.0**-12), form)
    p.grad = torch.tensor([1.0, 1, 1, 0, 0, 1, 0, 1]).bfloat16()
    optimizer.step()
    with torch.no_grad():
        p[7] = 0.0
    p.grad = torch.zeros_like(p)
    optimizer.step()
    expected = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 3.3e38, 0.0]).bfloat16()
    torch.testing.assert_close(p.detach()[:5], expected[:5], equal_nan=True, rtol=0, atol=0)
    assert torch.signbit(p.detach()[4])
    assert p[7].abs() < 2.0**-9  # so that it is a number, too


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
        lambda p: optim.AdamW(p, lr=1e-2, betas=(torch.tensor(0.9), torch.tensor(0.999))),
        lambda p: optim.RMSprop(p, lr=1e-2),
        lambda p: type("Mine", (optim.AdamW,), {})(p, lr=1e-2),
    ],
    ids=["amsgrad", "betas", "RMSprop", "a user's"],
)
def test_what_the_kernel_does_not_know_takes_torchs_own_way(make, launches, monkeypatch):
    found = []
    for bucket in (registry.BUCKET, 1):
        monkeypatch.setattr(registry, "BUCKET", bucket)
        model = net()
        train(model, add_masters(make(model.parameters()), "remainder"), 3)
        found.append(list(model.parameters()))
    assert not launches
    assert all(map(torch.equal, *found))


def test_an_overflow_skips_the_step_and_the_next_step_is_sound(launches):
    plugin = HalfMixed("fp16", master_weights=True)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    module = net(torch.float32)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-2))
    before = [p.detach().clone() for p in module.parameters()]
    fabric.backward((model(X) * float("inf")).float().sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM) == 0
    optimizer.step()
    assert plugin.scaler.skipped_steps == 1
    assert all(map(torch.equal, before, module.parameters()))
    optimizer.zero_grad()
    plugin.scaler.scale = 8.0
    fabric.backward((model(X) - 1).float().square().mean())
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e9)
    assert norm.item() == pytest.approx(
        nn.utils.get_total_norm([p.grad.float() / 8 for p in module.parameters()]).item()
    )
    optimizer.step()
    assert launches
    assert all(p.isfinite().all() for p in module.parameters())
    assert not any(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loss_scale_that_is_no_power_of_two_is_taken_out_in_float32(dtype):
    weight = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    weight.grad_dtype = dtype
    optimizer = add_masters(optim.SGD([weight], lr=1.0), "fp32")
    for prepare in (move_grads_to_masters, lambda it: masters_step.unscale(it, 1 / 3)):  # gradients of -3 and -1
        weight.grad = torch.full_like(weight, 3.0, dtype=dtype)
        prepare(optimizer)
        optimizer.step()
    (master,) = main_params(optimizer)
    torch.testing.assert_close(master, torch.full((16,), -4.0))
    optimizer.zero_grad()
    assert masters_step.unscale(optimizer, 1 / 3) == 0, "no gradient, and so none that is not finite"


def in_fabric(dtype="bf16"):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=HalfMixed(dtype, master_weights=True))
    module = net(torch.float32)
    return fabric, *fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_backward_after_clipping_adds_an_unclipped_gradient(dtype, monkeypatch):
    def run():
        fabric, model, optimizer = in_fabric(dtype)
        for _ in range(2):
            fabric.backward((model(X) - 1).float().square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=1e-3)
            fabric.backward((model(X) - 1).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.optimizer.state_dict()["state"]

    assert_near(*both_ways(monkeypatch, run), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dropped", [slice(0, 4), slice(1, 3)], ids=["all", "some"])
def test_gradients_that_replace_clipped_ones_are_not_clipped(dropped, monkeypatch):
    def run():
        fabric, model, optimizer = in_fabric()
        norms = []
        for clips in (False, True, False):
            fabric.backward((model(X) - 1).float().square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=2.0**-10)
            for p in list(model.parameters())[dropped]:
                optimizer.optimizer._masters.master_of[id(p)].grad = p.grad = None
                p.grad = torch.full_like(p, 0.25)
            if clips:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, optimizer.optimizer.state_dict()["state"]

    (norms, ours), (expected, theirs) = both_ways(monkeypatch, run)
    assert norms == pytest.approx(expected, rel=1e-3)
    assert_near(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_float8_shards_under_fsdp2_get_new_scales(launches, monkeypatch):
    """The kernel writes to the memory of the shards, which are gathered as float8 with scales of their values."""

    def run():
        fabric = L.Fabric(accelerator="cpu", devices=1, strategy="fsdp2", precision="fp8-hybrid-remainder")
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-2))
        losses, sent = [], []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(X[:32, :24].repeat(1, 2)[:, :32]) - 1).float().square().mean()
            fabric.backward(loss)
            optimizer.step()
            shards = [p.to_local() for p in net.parameters() if p.ndim == 2]
            assert [shard._scales.stale for shard in shards] == [True, True]
            sent.append([p._local_tensor._kept.codes.float() for p in net.parameters() if p.ndim == 2])
            losses.append(loss.item())
        assert not any(torch.equal(*codes) for i in (0, 1) for codes in pairwise(step[i] for step in sent))
        return losses

    ours, theirs = both_ways(monkeypatch, run)
    assert launches
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert ours[-1] < 0.9 * ours[0]


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
    def run():
        model = net()
        optimizer = add_masters(optim.AdamW(model.parameters(), lr=1e-2), "remainder")
        train(model, optimizer, 3)
        change(model, optimizer)
        return train(model, optimizer, 2)

    assert_near(*both_ways(monkeypatch, run))
    stepped = {no_gradient: 3, another_gradient: 3, a_rate_for_one: 1}  # torch's own code steps the others
    assert len(launches[-1]) == stepped.get(change, 4)


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


SHAPES = (48, 96), (8, 3, 256), (65, 64), (65,)
"""Blocks of 32, 256 and 64 numbers, rows that the kernel's pieces do not end with, and one that keeps float32."""


def train_blocks(make, steps=3, **config):
    """Step with gradients that do not depend on the weights, so that one code that differs stays alone."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    optimizer = add_masters(make(params), MasterConfig(**config))
    optimizer.state["note"] = 1
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        grads = [torch.randn(shape, generator=generator).pow(3) * 10.0 ** (-i) for i, shape in enumerate(SHAPES)]
        sum((p.float() * g).sum() for p, g in zip(params, grads, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


@pytest.mark.parametrize("make", ["adamw", "adam", "momentum"])
@pytest.mark.parametrize("form", FORMS)
def test_block_moments_as_torchs_operations_make_them(form, make, launches, monkeypatch):
    ours, optimizer = train_blocks(OPTIMIZERS[make], form=form, moments="8bit")
    assert launches
    assert {row.moment for rows in launches for row in rows} == {"8bit", "fp32"}, "biases keep float32 moments"
    monkeypatch.setattr(kernel_step, "DEVICES", set())
    reference, theirs = train_blocks(OPTIMIZERS[make], form=form, moments="8bit")
    for a, b in zip(ours, reference, strict=True):
        assert (a != b).sum() <= 2 + a.numel() // 500  # float32 is rounded in another order, so a code may differ
        state, expected = optimizer.state[a], theirs.state[b]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            if value.element_size() == 1:
                differ = (state[name].view(torch.uint8) != value.view(torch.uint8)).sum()
                assert differ <= 2 + value.numel() // 500
            else:
                torch.testing.assert_close(state[name], value, rtol=1e-2, atol=1e-6)


def test_the_kernel_makes_the_first_step_too(launches):
    """Float32 moments of a large parameter are never in memory. Those of the bias are made by torch."""
    _, optimizer = train_blocks(OPTIMIZERS["adamw"], 1, form="remainder", moments="8bit")
    assert [len(rows) for rows in launches] == [1, 1, 1]
    assert all(state["step"] == 1 for state in optimizer.state.values() if state != 1)
