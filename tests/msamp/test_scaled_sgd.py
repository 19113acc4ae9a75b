"""ScaledSGD against a loop written from the specification, bit for bit; torch's SGD; state and memory."""

import copy
import re

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp import adamw_sgd
from lightning_lowprec.msamp.adamw_sgd import ScaledAdamW, ScaledSGD
from lightning_lowprec.msamp.weight import set_values_, values_of
from lightning_lowprec.numerics.formats import E4M3
from tests.msamp.scaled_cases import (
    LEVELS,
    accumulate,
    bits,
    bytes_at_rest,
    every_level,
    give,
    gradients,
    run,
    same,
    scaled_params,
    starts,
    through_file,
)
from tests.msamp.scaled_reference import SGDReference, quantise, value

FORMS = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampened": {"lr": 0.1, "momentum": 0.95, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
every_form = pytest.mark.parametrize("form", FORMS)


# ---- the arithmetic


@every_level
@every_form
@pytest.mark.parametrize("coded", [True, False], ids=["fp8-gradient", "float32-gradient"])
def test_ten_steps_are_those_of_the_specification(level, form, coded):
    params = scaled_params(level)
    optimizer = ScaledSGD(params, level=level, **FORMS[form])
    references = [SGDReference(v, level) for v in starts()]
    for step in range(10):
        run(optimizer, params, [step], coded)
        for reference, g in zip(references, gradients(step), strict=True):
            reference.step(value(quantise(g, torch.float8_e4m3fn)) if coded else g, **FORMS[form])
    for p, reference in zip(params, references, strict=True):
        assert torch.equal(p.msamp_state.codes.float(), reference.weight[0].float())
        assert p.msamp_state.scale.item() == reference.weight[1]
        state = optimizer.state[p]
        if reference.buffer is None:
            assert "momentum_buffer" not in state
        elif level == "O1":
            assert torch.equal(state["momentum_buffer"], reference.buffer)
        else:
            assert state["momentum_buffer"].dtype == torch.float16
            assert torch.equal(state["momentum_buffer"], reference.buffer[0])
            assert state["momentum_buffer_scale"].item() == reference.buffer[1]
        if level == "O3":
            assert torch.equal(p.msamp_state.master, reference.master[0])
            assert p.msamp_state.master_scale.item() == reference.master[1]


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_parameters_get_torchs_sgd(form, dtype):
    ours = [nn.Parameter(v.to(dtype)) for v in starts()]
    # half precision: float32 buffer and update, rounded after each step
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer, reference = ScaledSGD(ours, **FORMS[form]), torch.optim.SGD(theirs, **FORMS[form])
    for step in range(5):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.to(dtype), g.to(dtype).float()
        optimizer.step()
        reference.step()
        for q in theirs:
            q.data = q.data.to(dtype).float()
    assert all(torch.equal(p.float(), q) for p, q in zip(ours, theirs, strict=True))
    if dtype == torch.float32:
        a, b = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert {i: set(entry) for i, entry in a.items()} == {i: set(entry) for i, entry in b.items()}


@every_level
def test_a_parameter_that_joins_later_starts_its_buffer_with_its_first_gradient(level):
    params = scaled_params(level)
    optimizer = ScaledSGD(params, level=level, **FORMS["dampened"])
    references = [SGDReference(v, level) for v in starts()]
    for step in range(6):
        for i, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            if (step + i) % 3:
                p.grad = g
                references[i].step(g, **FORMS["dampened"])
        optimizer.step()
        optimizer.zero_grad()
    for p, reference in zip(params, references, strict=True):
        assert torch.equal(p.msamp_state.codes.float(), reference.weight[0].float())


def test_momentum_that_is_switched_on_later_starts_with_the_next_gradient():
    params, plain = scaled_params("O2"), [nn.Parameter(v) for v in starts()]
    optimizer = ScaledSGD([*params, *plain], level="O2", **FORMS["plain"])
    references = [SGDReference(v, "O2") for v in starts()]
    theirs = [nn.Parameter(v) for v in starts()]
    reference = torch.optim.SGD(theirs, **FORMS["plain"])
    for step in range(4):
        options = FORMS["plain" if step < 2 else "momentum"]
        optimizer.param_groups[0].update(options)
        reference.param_groups[0].update(options)
        give(plain, step, coded=False)
        give(theirs, step, coded=False)
        run(optimizer, params, [step], coded=False)
        reference.step()
        for r, g in zip(references, gradients(step), strict=True):
            r.step(g, **options)
    assert all(
        torch.equal(p.msamp_state.codes.float(), r.weight[0].float()) for p, r in zip(params, references, strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(plain, theirs, strict=True))


# ---- the format of the buffer


def decayed(steps, momentum=0.95):
    """The buffer of a weight that had gradients of 1 to 2 once and none since, as a part of what is right."""
    (p,) = scaled_params("O2", [torch.zeros(64)])
    first = torch.linspace(1, 2, 64)
    optimizer = ScaledSGD([p], lr=1e-3, momentum=momentum, level="O2")
    for step in range(steps):
        p.grad = first if step == 0 else torch.zeros(64)
        optimizer.step()
    state = optimizer.state[p]
    return state["momentum_buffer"].float() / state["momentum_buffer_scale"] / (first * momentum ** (steps - 1))


def test_a_float16_buffer_decays_where_a_float8_one_would_stand_still(monkeypatch):
    assert bool(((decayed(100) - 1).abs() < 0.05).all())  # 100 roundings of at most 2**-11 each
    monkeypatch.setattr(adamw_sgd, "_SGD_MOMENTS", {"momentum_buffer": E4M3})
    assert bool((decayed(100) > 10).any())


# ---- state


@every_level
@every_form
@pytest.mark.parametrize("stochastic", [False, True])
def test_resume_is_bit_exact(level, form, stochastic, tmp_path):
    options = {**FORMS[form], "level": level, "stochastic_rounding": stochastic}
    params = scaled_params(level)
    plain = nn.Parameter(torch.ones(3))
    optimizer = ScaledSGD([{"params": params}, {"params": [plain], "lr": 1e-2}], **options)
    plain.grad = torch.ones(3)
    run(optimizer, params, range(4))
    saved = through_file({"weights": [values_of(p) for p in params], "optimizer": optimizer.state_dict()}, tmp_path)
    fresh, other = scaled_params(level, starts(seed=1)), nn.Parameter(plain.detach().clone())
    resumed = ScaledSGD([{"params": fresh}, {"params": [other]}], **options)
    for p, weights in zip(fresh, saved["weights"], strict=True):
        set_values_(p, weights)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[1]["lr"] == 1e-2
    for p, q in zip([*params, plain], [*fresh, other], strict=True):
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for key, tensor in optimizer.state[p].items():
            mine = resumed.state[q][key]
            assert mine == tensor if key == "step" else torch.equal(mine.float(), tensor.float()), key
            assert key == "step" or mine.dtype == tensor.dtype
    for step in range(4, 8):
        plain.grad, other.grad = torch.ones(3), torch.ones(3)
        run(optimizer, params, [step])
        run(resumed, fresh, [step])
    assert same(bits(params), bits(fresh))
    assert torch.equal(plain, other)


@every_level
@pytest.mark.parametrize("origin", [*LEVELS, "SGD", "SGD without momentum"])
def test_the_state_of_another_level_or_of_sgd_loads(level, origin, tmp_path):
    if origin.startswith("SGD"):
        source = [nn.Parameter(v) for v in starts()]
        optimizer = torch.optim.SGD(source, **FORMS["plain" if "without" in origin else "momentum"])
        give(source, 0, coded=False)
        optimizer.step()
    else:
        source = scaled_params(origin)
        optimizer = ScaledSGD(source, level=origin, **FORMS["momentum"])
        run(optimizer, source, [0])
    params = scaled_params(level)
    target = ScaledSGD(params, level=level, **FORMS["momentum"])
    target.load_state_dict(through_file(optimizer.state_dict(), tmp_path))
    for p, q in zip(source, params, strict=True):
        a, b = optimizer.state[p], target.state[q]
        if a.get("momentum_buffer") is None:
            assert "momentum_buffer" not in b
            continue
        before = a["momentum_buffer"].float() / a.get("momentum_buffer_scale", 1.0)
        after = b["momentum_buffer"].float() / b.get("momentum_buffer_scale", 1.0)
        assert torch.allclose(after, before, rtol=2.0**-11, atol=before.abs().max().item() * 2.0**-24)
    target.param_groups[0].update(FORMS["momentum"])
    run(target, params, [1])
    assert all(bool(values_of(p).isfinite().all()) for p in params)


def test_loaded_buffers_and_missing_ones_step_beside_each_other():
    source = [nn.Parameter(v) for v in starts()]
    torchs = torch.optim.SGD(source, **FORMS["dampened"])
    give(source[:2], 0, coded=False)
    torchs.step()
    params, references = scaled_params("O1"), [SGDReference(v, "O1") for v in starts()]
    optimizer = ScaledSGD(params, level="O1", **FORMS["dampened"])
    optimizer.load_state_dict(torchs.state_dict())
    run(optimizer, params, [1], coded=False)
    for i, (p, reference, g) in enumerate(zip(params, references, gradients(1), strict=True)):
        reference.buffer = torchs.state[source[i]]["momentum_buffer"] if i < 2 else None
        reference.step(g, **FORMS["dampened"])
        assert torch.equal(p.msamp_state.codes.float(), reference.weight[0].float())


def test_the_state_of_another_optimizer_is_refused():
    params = scaled_params("O2")
    adamw = ScaledAdamW(params, level="O2")
    run(adamw, params, [0])
    sgd = ScaledSGD(params, momentum=0.9, level="O2")
    state = {**sgd.state_dict(), "state": adamw.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"holds exp_avg, .*; expected that of an optimizer with momentum_buffer"):
        sgd.load_state_dict(state)


def test_a_copy_keeps_the_options():
    optimizer = ScaledSGD(scaled_params("O1"), level="O1", stochastic_rounding=True, seed=5, **FORMS["momentum"])
    clone = copy.deepcopy(optimizer)
    assert (clone.level, clone.stochastic_rounding, clone.seed) == ("O1", True, 5)


# ---- memory, edges


@pytest.mark.parametrize(
    ("level", "momentum", "allowed"),
    [("O1", 0.9, 7.1), ("O2", 0.9, 5.1), ("O3", 0.9, 6.1), ("O1", 0, 3.1), ("O2", 0, 3.1), ("O3", 0, 4.1)],
)
def test_bytes_per_parameter(level, momentum, allowed):
    (p,) = scaled_params(level, [torch.randn(256, 256)])
    optimizer = ScaledSGD([p], momentum=momentum, level=level)
    accumulate(p, torch.randn(256, 256))
    optimizer.step()
    assert allowed - 0.2 <= bytes_at_rest(p, optimizer) <= allowed


@every_level
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_in_the_weight_and_scales_stay_finite(level, bad):
    params = scaled_params(level)
    optimizer = ScaledSGD(params, level=level, **FORMS["momentum"])
    run(optimizer, params, [0])
    give(params, 1, coded=True)
    g = gradients(1)[0]
    g[0, 0] = bad
    params[0].grad = None
    accumulate(params[0], g)
    optimizer.step()
    assert not bool(values_of(params[0])[0, 0].isfinite())
    assert all(bool(p.msamp_state.scale.isfinite()) for p in params)
    assert bool(values_of(params[1]).isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O4"}, "`level='O4'` is not valid; expected one of: O1, O2, O3."),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"momentum": -0.1}, "Invalid momentum value: -0.1"),
        ({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov momentum requires"),
        ({"maximize": True}, "`maximize=True` of ScaledSGD is not possible with MS-AMP."),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ScaledSGD([nn.Parameter(torch.ones(2))], **options)
