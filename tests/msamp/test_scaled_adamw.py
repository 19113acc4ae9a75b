"""ScaledAdamW against a loop written from the specification, bit for bit; its state, its edges, its compiled step."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from lightning_lowprec.msamp import ScaledAdamW, scale_weight_
from lightning_lowprec.msamp import adamw as msamp_step
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.plugin import convert_optimizer_
from tests.msamp.msamp_runs import every_level
from tests.msamp.scaled_reference import Reference, quantise, value

SHAPES = [(33, 17), (5,), (64, 8), (1,), (3, 2, 5), (8,)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SECOND = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0}


def starts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1.0, 1e-3, 30.0, 1e-6, 0.1, 0.0]
    return [torch.randn(s, generator=generator) * f for s, f in zip(SHAPES, sizes, strict=True)]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator) * 10.0 ** -(i + step % 3) * (i < 5) for i, s in enumerate(SHAPES)]


def scaled_params(level, values=None):
    values = (v.movedim(0, -1) for v in (starts() if values is None else values))
    params = [nn.Parameter(v.contiguous().movedim(-1, 0)) for v in values]  # in other layouts than gradients
    for p in params:
        scale_weight_(p, level)
    return params


def in_two_groups(params):
    return [{"params": params[:3]}, {"params": params[3:], **SECOND}]


def give(params, step, coded=True):
    for p, g in zip(params, gradients(step), strict=True):
        p.grad = ScaledGradient.of(g) if coded else g


def converted(kind, params, level="O2", **options):
    optimizer = kind(params, **{**OPTIONS, **options})
    convert_optimizer_(optimizer, level)
    return optimizer


@every_level
@pytest.mark.parametrize("coded", [True, False], ids=["fp8-gradient", "float32-gradient"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_ten_steps_are_those_of_the_specification(level, coded, kind):
    params = scaled_params(level)
    optimizer = converted(kind, in_two_groups(params), level)
    references = [Reference(v, level) for v in starts()]
    for step in range(10):
        give(params, step, coded)
        for i, (p, reference, g) in enumerate(zip(params, references, gradients(step), strict=True)):
            if (step + i) % 4:
                g = value(quantise(g, torch.float8_e4m3fn)) if coded else g
                reference.step(g, **(OPTIONS if i < 3 else SECOND), coupled=kind is Adam)
            else:
                p.grad = None  # it stays, and counts its own steps
        optimizer.step()
    for p, reference in zip(params, references, strict=True):
        assert optimizer.state[p]["step"] == reference.t
        assert torch.equal(p.msamp_state.codes, reference.master[0])
        assert p.msamp_state.scale.item() == reference.master[1]
        state = optimizer.state[p]
        if level == "O1":
            assert torch.equal(state["exp_avg"], reference.m)
            assert torch.equal(state["exp_avg_sq"], reference.v)
            continue
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.float16)
        for key, coded_state in {"exp_avg": reference.m, "exp_avg_sq": reference.v}.items():
            assert torch.equal(state[key].float(), coded_state[0].float())
            assert state[f"{key}_scale"].item() == coded_state[1]
        if level == "O3":
            assert torch.equal(p.msamp_state.e4m3.float(), reference.weight[0].float())
            assert p.msamp_state.e4m3_scale.item() == reference.weight[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_plain_parameters_get_torchs_step(dtype, implementation, kind):
    """With all of their digits; in half precision moments and update are float32, rounded after each step."""
    if dtype.is_complex and "fused" in implementation:
        pytest.skip("torch has none")
    wide = torch.promote_types(dtype, torch.float32)
    digits = 1 + 2**-30 + (1j if dtype.is_complex else 0)
    ours = [nn.Parameter((v * digits).to(dtype)) for v in starts()]
    theirs = [nn.Parameter(p.detach().to(wide)) for p in ours]
    options = {**OPTIONS, **implementation}
    groups = [*in_two_groups(ours), {"params": scaled_params("O2")}]
    optimizer, reference = converted(kind, groups, **options), kind(in_two_groups(theirs), **options)
    for step in range(5):
        ours[0].grad = torch.zeros_like(ours[0]).to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradients"):
            optimizer.step()  # the program catches it, and goes on
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad = (g * digits).to(dtype)
            q.grad = p.grad.to(wide)
        optimizer.step()
        reference.step()
        for q in theirs:
            q.data = q.data.to(dtype).to(wide)
        if dtype == wide:  # as in a run that goes on
            optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p.to(wide), q) for p, q in zip(ours, theirs, strict=True))


def test_the_state_of_another_optimizer_is_refused():
    source = [nn.Parameter(v) for v in starts()]
    sgd = torch.optim.SGD(source, momentum=0.9)
    give(source, 0, coded=False)
    sgd.step()
    adamw = ScaledAdamW(scaled_params("O2"), level="O2")
    state = {**adamw.state_dict(), "state": sgd.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"holds momentum_buffer; expected that of an optimizer with exp_avg, "):
        adamw.load_state_dict(state)
    state["state"][0]["exp_avg"] = torch.ones(33, 17)  # one that has both goes on with what AdamW knows
    adamw.load_state_dict({**state, "state": {0: state["state"][0]}})
    assert adamw.state_dict()["state"][0]["exp_avg"].eq(1.0).all()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("restored", ["loaded", "copied", "pickled"])
def test_the_way_of_the_decay_is_restored_as_torch_does(kind, restored):
    """An AdamW that loads the state of an Adam stays an AdamW; an Adam stays an Adam in copies."""
    optimizer, plain = kind(scaled_params("O2"), **OPTIONS), kind([nn.Parameter(v) for v in starts()], **OPTIONS)
    convert_optimizer_(optimizer, "O2")
    if restored == "loaded":
        saved = torch.optim.Adam([nn.Parameter(v) for v in starts()], **OPTIONS).state_dict()
        optimizer.load_state_dict(saved)
        plain.load_state_dict(saved)
    else:
        optimizer = copy.deepcopy(optimizer) if restored == "copied" else pickle.loads(pickle.dumps(optimizer))
    (group,), (expected,) = optimizer.param_groups, plain.param_groups
    assert group["decoupled_weight_decay"] is expected["decoupled_weight_decay"] is (kind is torch.optim.AdamW)


@pytest.mark.parametrize(("level", "allowed"), [("O1", 11.1), ("O2", 6.1), ("O3", 7.1)])
def test_bytes_per_parameter(level, allowed):
    """Of all that one weight and its optimizer hold after a step: those of MS-AMP's chart, and scales."""
    p, empty = scaled_params(level, [torch.randn(256, 256), torch.zeros(0)])
    optimizer = ScaledAdamW([p, empty], level=level)
    p.grad, empty.grad = ScaledGradient.of(torch.randn(256, 256)), torch.zeros(0)
    optimizer.step()
    kept = [p.grad.codes, p.grad.inv_scale, *vars(p.msamp_state).values(), *optimizer.state[p].values()]
    storages = [t.untyped_storage() for t in kept if isinstance(t, torch.Tensor)]
    assert sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) <= allowed * p.numel()


def test_a_parameter_of_another_level_and_one_scaled_twice_are_refused():
    (p,) = scaled_params("O3", [torch.ones(2)])
    with pytest.raises(ValueError, match=r"`level='O2'` is not valid for a parameter of torch.float8_e4m3fn codes"):
        ScaledAdamW([{"params": nn.Parameter(torch.ones(2))}, {"params": p}], level="O2")
    with pytest.raises(ValueError, match="codes already"):
        scale_weight_(p, "O3")
    for refused in (scale_weight_, lambda p, level: ScaledAdamW([p], level=level)):
        with pytest.raises(ValueError, match=r"`level='O9'` is not valid; expected one of: O1, O2, O3\."):
            refused(nn.Parameter(torch.ones(2)), "O9")
    late = ScaledAdamW([p], level="O3")
    late.param_groups[0]["amsgrad"] = True
    for refused in (lambda: ScaledAdamW([nn.Parameter(torch.ones(2))], amsgrad=True), late.step):
        with pytest.raises(ValueError, match=r"`amsgrad=True` of ScaledAdamW is not possible with MS-AMP"):
            refused()


@pytest.fixture
def aot_eager(monkeypatch):
    monkeypatch.setattr(msamp_step, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    msamp_step._compiled_by.cache_clear()


def trained(level, steps=5, **options):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, **OPTIONS, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"] / (step + 1)  # as a scheduler
        give(params, step)
        optimizer.step()
    return [{**vars(p.msamp_state), **optimizer.state[p]} for p in params]


# O1 has the passes of O2
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_compiled_step_has_the_bits_of_an_eager_one(level, aot_eager):
    torch._dynamo.utils.counters.clear()
    states = trained(level)
    assert not torch._dynamo.utils.counters["stats"]
    compiled = trained(level, compile=True)
    passes = 2 + (level == "O3")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * passes, "any size, and one element"
    assert not torch._dynamo.utils.counters["graph_break"]
    for a, b in zip(states, compiled, strict=True):
        assert a.keys() == b.keys()
        for key, kept in a.items():
            assert torch.equal(kept.float(), b[key].float()) if isinstance(kept, torch.Tensor) else kept == b[key], key
