"""Everything else that happens to an optimizer: groups, schedulers, hooks, edits of weights, errors, copies."""

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

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.masters.weights import HalfWeights, cast_parameters
from tests.masters.master_loops import (
    ADAMW,
    SGD,
    by_hand,
    equal,
    every_exact_form,
    every_form,
    half,
    masters_of,
    step,
    train,
    without_masters,
    wrapped,
)

# ---- values

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=1e-2),
    "sgd-momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "adamw-for": partial(optim.AdamW, lr=1e-3, foreach=False),
    "adamw-foreach": partial(optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=1e-3, fused=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": partial(optim.NAdam, lr=1e-3),
    "radam": partial(optim.RAdam, lr=1e-3),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=1e-3),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "muon": partial(optim.Muon, lr=1e-3),
}
STEPS = 12


def check_equal(model, optimizer, reference):
    ref_model, ref_optimizer, ref_masters = reference
    assert equal(list(model.parameters()), list(ref_model.parameters()))
    assert equal(masters_of(optimizer), ref_masters)
    assert equal(without_masters(optimizer.state_dict())["state"], ref_optimizer.state_dict()["state"])


@every_exact_form
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_as_by_hand(name, form, closure):
    make, bias = OPTIMIZERS[name], name != "muon"
    model, optimizer = wrapped(make, form, bias=bias)
    train(model, optimizer, range(STEPS), closure)
    check_equal(model, optimizer, by_hand(make, form, STEPS, bias=bias))


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw-foreach"])
def test_fp16(name):
    model, optimizer = wrapped(OPTIMIZERS[name], "fp32", dtype=torch.float16)
    train(model, optimizer, range(STEPS))
    check_equal(model, optimizer, by_hand(OPTIMIZERS[name], "fp32", STEPS, dtype=torch.float16))


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


def test_an_optimizer_that_steps_another_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="ZeroRedundancyOptimizer steps another optimizer inside"):
            add_masters(ZeroRedundancyOptimizer([weight], optimizer_class=torch.optim.SGD, lr=0.1))
    finally:
        dist.destroy_process_group()


# ---- the cast of a model


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[2].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_place_with_ties_and_frozen_parameters(dtype):
    net = tied()
    before = {name: (p, p.detach().clone()) for name, p in net.named_parameters()}
    originals = cast_parameters(net, dtype, keep=True)
    assert dict(net.named_parameters()).keys() == before.keys()
    for name, p in net.named_parameters():
        same, value = before[name]
        assert p is same
        assert p.dtype == dtype
        assert torch.equal(p, value.to(dtype))
        assert torch.equal(originals[id(p)], value)
    assert net[2].weight is net[0].weight
    assert not net[2].bias.requires_grad
    assert len(originals) == 5
    assert net[1].running_mean.dtype == torch.float32


def test_buffers_gradients_and_not_keeping():
    net = tied()
    net[0].weight.grad = torch.ones(4, 4)
    mean = net[1].running_mean
    assert cast_parameters(net, torch.bfloat16, keep=False, buffer_dtype=torch.bfloat16) == {}
    assert net[0].weight.grad.dtype == torch.bfloat16
    assert net[1].running_mean is mean
    assert mean.dtype == torch.bfloat16
    assert net[1].num_batches_tracked.dtype == torch.int64
    net(torch.randn(3, 4).bfloat16()).sum().backward()


def test_skip_by_name_counts_every_name_of_a_tie():
    net = tied()
    cast_parameters(net, torch.bfloat16, keep=False, skip=["1.weight", "1.bias", "2.weight"])
    assert {name for name, p in net.named_parameters() if p.dtype == torch.float32} == {
        "0.weight",
        "1.weight",
        "1.bias",
    }


def test_the_second_cast_keeps_nothing_and_other_dtypes_stay():
    net = tied()
    net.register_parameter("codes", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False))
    net.register_parameter("wide", nn.Parameter(torch.ones(2).double()))
    originals = cast_parameters(net, torch.bfloat16, keep=True)
    assert id(net.wide) not in originals
    assert net.wide.dtype == torch.float64
    assert net.codes.dtype == torch.float8_e4m3fn
    assert cast_parameters(net, torch.bfloat16, keep=True) == {}


def test_metrics_and_float64_and_complex_layers_stay():
    """torch itself computes the distance; what only the metric holds must give the same bits."""
    model = nn.ModuleDict(
        {
            "net": nn.Linear(4, 4),
            "wide": nn.Linear(4, 4).double(),
        }
    )
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
