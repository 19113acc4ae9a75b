"""Gradients on their way to the masters, and stores: memory, rounding on which replicas agree, state dicts."""

import math
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn, optim
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters import registry
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.moments import MASTER_PARAM
from lightning_lowprec.masters.optimizer import (
    add_masters,
    held_masters,
    main_params,
    move_grads_to_masters,
    show_master_grads,
)
from lightning_lowprec.private.torch_optimizers import steps_alone
from tests.masters.master_loops import (
    ADAMW,
    EXACT,
    equal,
    every_exact_form,
    every_form,
    half,
    masters_of,
    net,
    step,
    through_file,
    train,
    without_masters,
    wrapped,
)


@every_form
def test_preparing_after_every_micro_batch_accumulates_in_float32_and_hands_over_float32_gradients(form):
    p = half(1.0)
    optimizer = add_masters(optim.SGD([p], lr=1.0), form)
    for _ in range(1024):
        (p * 0.25).sum().backward()
        move_grads_to_masters(optimizer)
    (master,) = main_params(optimizer)
    assert master.grad.item() == 256.0  # bf16 stops at 64: 64.25 rounds back
    optimizer.zero_grad()
    p.grad_dtype = torch.float32
    (p * 0.25).sum().backward()
    first = p.grad
    move_grads_to_masters(optimizer)
    (master,) = main_params(optimizer)
    assert master.grad is first
    assert p.grad is None
    (p * 0.5).sum().backward()  # a micro-batch after clipping
    move_grads_to_masters(optimizer)
    assert master.grad.item() == 0.75
    show_master_grads(optimizer)
    assert p.grad is master.grad
    optimizer.step()
    assert p.grad_dtype is torch.float32
    assert p.item() == 0.25
    p.grad = torch.ones(1)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.item() == 0.0
    move_grads_to_masters(optimizer)
    optimizer.zero_grad()  # a skipped step leaves no float32 behind
    held = [store.flat.untyped_storage().nbytes() for store in optimizer._masters.stores]
    assert held == [0 if form != "fp32" else 32]


class Twice(optim.SGD):
    """Evaluates its closure a second time, as LBFGS does, or moves weights before the first time."""

    def __init__(self, params, *, moves):
        super().__init__(params, lr=1.0)
        self.moves = moves

    def step(self, closure):
        if self.moves == "first":
            with torch.no_grad():
                self.param_groups[-1]["params"][0].add_(1.0)
        closure()
        if self.moves == "between":
            super().step()
        closure()


@pytest.mark.parametrize(("moves", "left"), [("first", [4.0, 5.0]), ("between", [-4.0, -4.0]), ("never", [4.0, 4.0])])
def test_a_closure_that_an_optimizer_evaluates_again_or_where_it_has_moved_the_weights_is_refused(moves, left):
    first, last = half(4.0), half(4.0)
    groups = [{"params": [first]}, {"params": [last]}]
    optimizer = add_masters(Twice(groups, moves=moves), "fp32")
    with pytest.raises(RuntimeError, match=r"^Twice evaluates its closure where .*`32-true`.*`torch.optim.AdamW`"):
        optimizer.step(lambda: (first.square() + last.square()).sum().backward())
    assert [m.item() for m in main_params(optimizer)] == left
    assert equal([*main_params(optimizer)], [first.float(), last.float()]), "masters and weights go together"


def test_only_wrapped_optimizers():
    with pytest.raises(TypeError, match=r"^LBFGS evaluates its closure where .*`32-true`.*`torch.optim.AdamW`"):
        add_masters(optim.LBFGS([half(4.0)]), "remainder")
    plain = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(TypeError, match=r"expected an optimizer with masters, got SGD\. Call `add_masters`"):
        move_grads_to_masters(plain)
    assert list(main_params(plain)) == plain.param_groups[0]["params"]
    assert held_masters(plain) == []


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.device_mesh.init_device_mesh("cpu", (1,))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's own modules
@pytest.mark.parametrize(("order", "expected"), [(2.0, [96**0.5, 20**0.5]), (math.inf, [2.0, 2.0])])
def test_the_norm_is_that_of_all_meshes(mesh, order, expected, monkeypatch):
    monkeypatch.setattr(masters_step, "DEVICES", {"cpu"})
    other = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
    plain = [*(torch.ones(shape).bfloat16() for shape in ((4, 2), (8,), (3,))), torch.ones(4), torch.ones(1)]
    params = [distribute_tensor(plain[0], mesh, [Shard(0)]), distribute_tensor(plain[1], other, [Shard(0)]), *plain[2:]]
    params = [torch.nn.Parameter(p) for p in params]
    optimizer = add_masters(optim.SGD([*params, nn.Parameter(torch.ones(7))], lr=1.0), "fp32")
    for with_gradients, norm in zip((params, params[3:]), expected, strict=True):
        for p in with_gradients:
            p.grad = torch.full_like(p, 2.0)
        assert masters_step.defers(optimizer)
        assert masters_step.clip_by_norm(optimizer, 0.5, order).item() == pytest.approx(norm)
        optimizer.step()
        optimizer.zero_grad()
    for p in params:
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p).float().flatten()
        left = 1 - sum(1 / norm for norm in expected[: 2 if p.dtype == torch.float32 else 1])
        assert whole.tolist() == pytest.approx([left] * p.numel(), rel=2**-8, abs=1e-6)


OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@every_form
def test_one_parameter_at_a_time_gives_the_bits_of_all_at_once(form, make, monkeypatch):
    found = []
    for size, seed in ((1, 3), (registry.BUCKET, 3), (registry.BUCKET, 4)):
        monkeypatch.setattr(registry, "BUCKET", size)
        model = net().bfloat16()
        optimizer = add_masters(OPTIMIZERS[make](model.parameters()), MasterConfig(form=form, seed=seed))
        torch.manual_seed(size)  # random bits are of no generator
        train(model, optimizer, range(5))
        assert torch.initial_seed() == size
        assert len(optimizer._masters.stores) == (4 if size == 1 else 1)
        found.append((list(model.parameters()), optimizer.state_dict()["state"]))
    assert equal(found[0], found[1])
    assert equal(found[1], found[2]) == (form != "stochastic")


def test_step_hooks_see_all_masters(monkeypatch):
    monkeypatch.setattr(registry, "BUCKET", 1)
    model = net().bfloat16()
    for members, alone in (({}, False), ({"independent_parameters": True}, True)):
        mine = type("Mine", (optim.AdamW,), members)
        assert steps_alone(mine(model.parameters()), mine) is alone
    seen = []
    optimizer = add_masters(optim.AdamW(model.parameters()), MasterConfig())
    assert steps_alone(optimizer, optim.AdamW)
    of_all = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook, *of_all):
        hook = register(lambda found, *_: seen.append([p.dtype for p in found.param_groups[0]["params"]]))
        train(model, optimizer, range(1))
        hook.remove()
    assert seen == [[torch.float32] * 4] * 4


@every_exact_form
def test_the_state_of_an_optimizer_on_bf16_weights_becomes_float32_for_good(form):
    plain = net().bfloat16()
    saved = ADAMW(plain.parameters())
    train(plain, saved, range(4))
    model, optimizer = wrapped(ADAMW, form, seed=3)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(through_file(saved.state_dict()))
    moments = [entry["exp_avg_sq"] for entry in optimizer.state_dict()["state"].values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert equal([master.bfloat16() for master in masters_of(optimizer)], [p.detach() for p in plain.parameters()])
    train(model, optimizer, range(4, 6))
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert not torch.equal(moment, moment.bfloat16().float())
    add_masters(saved, form)
    assert {entry["exp_avg_sq"].dtype for entry in saved.state.values()} == {torch.float32}


@pytest.mark.parametrize("first", EXACT)
@pytest.mark.parametrize("second", EXACT)
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_carry_over_between_exact_forms_at_ties_too(first, second, model_first):
    bits = [0x3F808000, 0x3F818000, -0x407F8000 & 0xFFFFFFFF, 0x3F800001]
    tie = torch.tensor(bits).to(torch.int32).view(torch.float32)
    p = nn.Parameter(tie.bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=0.0), first, values={id(p): tie})
    step(optimizer, p)
    weight, state = p.detach().clone(), through_file(optimizer.state_dict())
    q = nn.Parameter(torch.randn(4).bfloat16())
    resumed = add_masters(optim.SGD([q], lr=0.0), second)
    loads = [lambda: resumed.load_state_dict(state), torch.no_grad()(lambda: q.copy_(weight))]
    for load in reversed(loads) if model_first else loads:
        load()
        resumed.zero_grad()  # whatever a script does between the two, the masters wait
    step(resumed, q)
    assert torch.equal(resumed.state_dict()["state"][0][MASTER_PARAM], tie)


def test_masters_are_there_before_the_first_step_and_without_other_state():
    _, optimizer = wrapped(partial(optim.SGD, lr=1.0), "remainder")
    assert all(list(entry) == [MASTER_PARAM] for entry in optimizer.state_dict()["state"].values())
    assert equal(masters_of(optimizer), [p.detach() for p in net().parameters()])
    assert without_masters(optimizer.state_dict())["state"] == {}
    _, adamw = wrapped(ADAMW, "remainder")  # an entry with nothing but a master must not look initialized to Adam
    model, other = wrapped(ADAMW, "fp32")
    other.load_state_dict(adamw.state_dict())
    assert len(other.state) == 0
    train(model, other, range(1))
