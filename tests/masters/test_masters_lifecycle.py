"""An optimizer with masters: groups, hooks, edits, moves, exceptions, copies, classes of other people."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import optimizer as torch_optimizer
from torchmetrics import Metric

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters import optimizer as optimizers
from lightning_lowprec.masters.optimizer import add_masters, held_masters, main_params
from lightning_lowprec.masters.registry import existing_masters
from lightning_lowprec.masters.stores import Store
from lightning_lowprec.masters.weights import HalfWeights
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
    two_groups,
    without_masters,
    wrapped,
)

OPTIMIZERS = {
    "sgd-momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "adamw-for": partial(optim.AdamW, lr=1e-3, foreach=False),
    "adamw-foreach": partial(optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=1e-3, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "muon": partial(optim.Muon, lr=1e-3),
}
STEPS = 12
CASES = [(name, form, torch.bfloat16) for name in OPTIMIZERS for form in EXACT]
CASES += [("sgd-momentum", "fp32", torch.float16), ("adamw-foreach", "fp32", torch.float16)]


@pytest.mark.parametrize(("name", "form", "dtype"), CASES)
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_as_by_hand(name, form, dtype, closure):
    make, bias = OPTIMIZERS[name], name != "muon"
    model, optimizer = wrapped(make, form, dtype, bias=bias)
    train(model, optimizer, range(STEPS // 2), closure)
    optimizer.zero_grad()  # between two steps: one without gradients, a look at the masters, a load of the own state
    optimizer.step()
    assert len(list(main_params(optimizer))) == len(masters_of(optimizer))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(STEPS // 2, STEPS), closure)
    expected, plain, masters = by_hand(make, form, STEPS, dtype, bias)
    assert equal(list(model.parameters()), list(expected.parameters()))
    assert equal(masters_of(optimizer), masters)
    assert equal(without_masters(optimizer.state_dict())["state"], plain.state_dict()["state"])


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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer steps another optimizer inside"):
        add_masters(ZeroRedundancyOptimizer([half(1.0)], optimizer_class=optim.SGD, lr=0.1))
    model, optimizer = wrapped(ADAMW, "fp32")
    model[2].float()
    changed = r"of shape \(6, 16\) was torch\.bfloat16 when .* is torch\.float32 now\. Cast the model.*`ModelPruning"
    with pytest.raises(RuntimeError, match=changed):
        optimizer.step()


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


def test_parameters_put_into_a_group_by_hand_get_masters():
    first, second = half(1.0), half(1.0)
    optimizer = add_masters(optim.SGD([first], lr=1e-3), "remainder")
    held = optimizer.param_groups[0]["params"]
    held[:] = [second]
    for _ in range(5):
        step(optimizer, first, second, grad=1.0)
    assert first.item() == 1.0, "which is in no group"
    assert masters_of(optimizer)[0].item() == pytest.approx(0.995, abs=1e-6)
    group = optimizer.param_groups[0]
    assert group["params"] is held, "which others may keep"
    optimizer.param_groups.append({**group, "params": [held.pop()], "lr": 1e-2})
    step(optimizer, second, grad=1.0)
    assert masters_of(optimizer)[0].item() == pytest.approx(0.985, abs=1e-6)
    late, exact = half(1.0), torch.tensor([1.001])
    held.extend([nn.Parameter(torch.ones(1)), late])
    add_masters(optimizer, "remainder", values={id(late): exact})
    assert torch.equal(existing_masters([late])[id(late)], exact)
    assert equal(copy.deepcopy(optimizer).state_dict(), optimizer.state_dict())


@every_exact_form
def test_layouts_empty_and_scalar_parameters(form):
    images = torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)
    values = images, torch.tensor(1.0).bfloat16(), torch.zeros(0, 3).bfloat16(), torch.randn(6, 4).bfloat16().t()
    params = [nn.Parameter(value) for value in values]
    optimizer = add_masters(optim.SGD(params, lr=2.0**-10), form)
    expected = [p.detach().float() for p in params]
    for _ in range(2):
        for master, p in zip(expected, params, strict=True):
            p.grad = torch.randn_like(p)
            master.sub_(p.grad.float(), alpha=2.0**-10)
        optimizer.step()
    assert all(map(torch.equal, main_params(optimizer), expected))
    assert [m.stride() for m in main_params(optimizer)][:2] == [v.stride() for v in values][:2]  # of fused kernels


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
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": calls.append("saved")}),
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded")),
    ]
    if loaded:
        optimizer.load_state_dict(state := optimizer.state_dict())
        assert "mine" in state
    train(model, optimizer, range(1))
    for handle in handles:
        handle.remove()
    assert sorted(calls) == ["global", *["loaded"] * loaded, "post", "pre", *["saved"] * loaded]


@every_exact_form
def test_what_a_post_hook_does_to_masters_reaches_the_weights(form):
    p = half(1.0, -1.0)
    optimizer = add_masters(optim.SGD([p], lr=1e-3), form)
    optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0]["params"][0].data.clamp_(min=0.5))
    step(optimizer, p)
    assert torch.equal(p, torch.tensor([1.0, 0.5]).bfloat16())


def test_metrics_and_float64_and_complex_layers_stay():
    model = nn.ModuleDict({"net": nn.Linear(4, 4), "wide": nn.Linear(4, 4).double()})
    model["fourier"] = nn.Linear(4, 4, dtype=torch.complex64)
    model["metric"] = Distance(nn.Linear(4, 4), nn.Linear(4, 4).half())
    model["same"] = Distance(model["metric"].encoder, nn.Identity())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.startswith("net")}
    HalfWeights(MasterConfig(), buffer_dtype=torch.bfloat16).cast(model, torch.bfloat16)
    assert model["net"].weight.dtype == torch.bfloat16
    for name, tensor in before.items():
        assert model.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(model.state_dict()[name], tensor), name


class Distance(Metric):
    update = compute = nn.Module.forward

    def __init__(self, encoder, half):
        super().__init__()
        self.encoder, self.half_encoder = encoder, half
        self.register_buffer("mean", torch.randn(3))


EDITS = {
    "in place": torch.no_grad()(lambda p, value: p.copy_(value)),
    "new data": lambda p, value: setattr(p, "data", value.bfloat16()),
}


@every_form
@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_noticed(form, edit):
    p = half(1.0, 1.0, 1.0)
    optimizer = add_masters(optim.SGD([p], lr=1e-4), form)
    step(optimizer, p, grad=1.0)
    unedited = masters_of(optimizer)[0][0] if form in EXACT else None
    EDITS[edit](p, torch.stack([p[0].detach(), *torch.tensor([3.0, 0.0]).bfloat16()]))
    step(optimizer, p)
    assert p[1:].tolist() == [3.0, 0.0]
    if form in EXACT:  # the element that was not edited keeps what its master had beyond the weight
        assert masters_of(optimizer)[0][0] == unedited


@every_form
def test_parameters_that_moved_get_new_stores(form, monkeypatch):
    model, optimizer = wrapped(SGD, form)
    train(model, optimizer, range(3))
    old = optimizer._masters.stores[0]
    monkeypatch.setattr(Store, "moved", lambda store: store is old)  # as `model.to(device)` makes it
    train(model, optimizer, range(3, 6))
    assert optimizer._masters.stores[0] is not old
    if form in EXACT:
        reference, _, masters = by_hand(SGD, form, 6)
        assert equal(masters_of(optimizer), masters)
        assert equal(list(model.parameters()), list(reference.parameters()))


class Broken(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise KeyError("no batch")

    def eval(self):
        self.param_groups[0]["params"][0].data.add_(1.0)
        raise KeyError("no batch")


@every_form
@pytest.mark.parametrize("make", [partial(Broken, lr=0.1), two_groups], ids=["a user's", "AdamW"])
def test_an_exception_in_the_middle_of_a_step_leaves_weights_and_masters_in_step(form, make):
    model, optimizer = wrapped(make, form)
    start = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    optimizers.move_grads_to_masters(optimizer)
    if form in EXACT and make is not two_groups:
        with pytest.raises(KeyError, match="no batch"):
            optimizer.eval()  # of schedule-free optimizers, which keeps gradients
        assert equal([m.bfloat16() for m in masters_of(optimizer)], [p.detach() for p in model.parameters()])
        assert all(m.grad is not None for m in held_masters(optimizer))
    optimizer.param_groups[0].pop("eps", None)
    with pytest.raises(KeyError, match=r"no batch|eps"):
        optimizer.step()
    assert [p for group in optimizer.param_groups for p in group["params"]] == [*model.parameters()]
    assert optimizer.param_groups[0].get("rounding_step", 1) == 1
    assert equal(start, list(model.parameters())) == (make is two_groups)
    if form in EXACT:
        assert equal([m.bfloat16() for m in masters_of(optimizer)], [p.detach() for p in model.parameters()])
    if form != "fp32":
        assert optimizer._masters.stores[0].flat.untyped_storage().nbytes() == 0
    assert all(m.grad is None for m in held_masters(optimizer))


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
    assert next(iter(main_params(optimizer))).shape == p.shape
    optimizer.load_state_dict(optimizer.state_dict())
    for other in (copy.deepcopy(optimizer), optimizer):
        optimizers.remove_masters(other)
        assert other.state_dict()["state"]["calls"] == 5


@every_form
def test_a_state_dict_with_some_masters_leaves_the_others(form):
    params = [nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16)) for _ in range(2)]
    exact = torch.full((4,), 1.001)
    saved = add_masters(torch.optim.AdamW(params), values={id(p): exact for p in params})
    optimizer = add_masters(torch.optim.AdamW(params), form, values={id(p): exact.clone() for p in params})
    state = (optimizer if form == "fp32" else saved).state_dict()  # of the memory of the masters
    optimizer.load_state_dict({**state, "state": {0: state["state"][0]}})
    assert [p.tolist() for p in params] == [[1.0] * 4] * 2
    if form in EXACT:
        assert equal(masters_of(optimizer), [exact, exact])
    others = [half(3.0, 3.0, 3.0, 3.0) for _ in params]  # weights that the masters do not round to win
    optimizer = add_masters(torch.optim.AdamW(others), form)
    optimizer.load_state_dict(state)
    assert equal([*main_params(optimizer)], [p.detach().float() for p in others])
