"""ScaledAdamW against a loop written from the specification, bit for bit; its memory."""

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from lightning_lowprec.msamp.adamw import ScaledAdamW, convert_optimizer_
from lightning_lowprec.msamp.weight import values_of
from lightning_lowprec.numerics.parameters import parameters_of
from tests.msamp.scaled_cases import (
    OPTIONS,
    accumulate,
    bytes_at_rest,
    every_level,
    give,
    gradients,
    run,
    scaled_params,
    starts,
)
from tests.msamp.scaled_reference import Reference, quantise, value


def converted(kind, params, level="O2", **options):
    optimizer = kind(params, **{**OPTIONS, **options})
    convert_optimizer_(optimizer, level)
    return optimizer


# ---- the arithmetic


@every_level
@pytest.mark.parametrize("coded", [True, False], ids=["fp8-gradient", "float32-gradient"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_ten_steps_are_those_of_the_specification(level, coded, kind):
    params = scaled_params(level)
    optimizer = converted(kind, params, level)
    references = [Reference(v, level) for v in starts()]
    for step in range(10):
        run(optimizer, params, [step], coded)
        for reference, g in zip(references, gradients(step), strict=True):
            g = value(quantise(g, torch.float8_e4m3fn)) if coded else g
            reference.step(g, **OPTIONS, coupled=kind is Adam)
    for p, reference in zip(params, references, strict=True):
        assert torch.equal(p.msamp_state.codes, reference.master[0])
        assert p.msamp_state.scale.item() == reference.master[1]
        state = optimizer.state[p]
        if level == "O1":
            assert torch.equal(state["exp_avg"], reference.m)
            assert torch.equal(state["exp_avg_sq"], reference.v)
            continue
        assert state["exp_avg"].dtype == torch.float8_e4m3fn
        assert state["exp_avg_sq"].dtype == torch.float16
        for key, coded_state in {"exp_avg": reference.m, "exp_avg_sq": reference.v}.items():
            assert torch.equal(state[key].float(), coded_state[0].float())
            assert state[f"{key}_scale"].item() == coded_state[1]
        if level == "O3":
            assert torch.equal(p.msamp_state.e4m3.float(), reference.weight[0].float())
            assert p.msamp_state.e4m3_scale.item() == reference.weight[1]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_complex_and_float64_parameters_keep_their_digits(dtype):
    """Also in a run that goes on from a state dict in the middle."""
    ours, theirs = (
        [nn.Parameter(v.to(dtype) * (1 + 2**-30 + (1j if dtype.is_complex else 0))) for v in starts()] for _ in "ab"
    )
    optimizer, reference = converted(AdamW, [*ours, *scaled_params("O2")]), AdamW(theirs, **OPTIONS)
    for step in range(5):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.to(dtype) * p.detach(), g.to(dtype) * q.detach()
        optimizer.step()
        reference.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_plain_parameters_get_torchs_step(dtype, implementation, kind):
    ours = [nn.Parameter(v.to(dtype)) for v in starts()]
    # half precision: float32 moments and update, rounded after each step
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    options = {**OPTIONS, **implementation}
    optimizer, reference = converted(kind, [*ours, *scaled_params("O2")], **options), kind(theirs, **options)
    for step in range(5):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.to(dtype), g.to(dtype).float()
        optimizer.step()
        reference.step()
        for q in theirs:
            q.data = q.data.to(dtype).float()
    assert all(torch.equal(p.float(), q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_step_of_adam_is_torchs_adam_on_the_same_values(decay):
    """L2 is added to the gradient. The moments of level O1 are float32, so that only the weight is rounded."""
    params = scaled_params("O1")
    optimizer = converted(Adam, params, "O1", weight_decay=decay)
    theirs = [nn.Parameter(values_of(p)) for p in params]
    reference = Adam(theirs, **{**OPTIONS, "weight_decay": decay})
    for step in range(5):
        give(params, step, coded=True)
        for p, q in zip(params, theirs, strict=True):
            q.data, q.grad = values_of(p), p.grad.decode()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(values_of(p), q.detach(), rtol=2**-11 + 1e-6, atol=1e-9)


def test_gradients_of_micro_batches_add_up():
    (p,) = scaled_params("O2", [torch.zeros(64)])
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    coded = quantise(parts[0], torch.float8_e4m3fn)
    accumulate(p, parts[0])
    for part in parts[1:]:
        accumulate(p, part)
        coded = quantise(part + value(coded), torch.float8_e4m3fn)
    assert torch.equal(p.grad.codes.float() * p.grad.inv_scale, value(coded))


@every_level
def test_parameters_without_a_gradient_stay_and_count_their_own_steps(level):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, **OPTIONS)
    references = [Reference(v, level) for v in starts()]
    for step in range(6):
        for i, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            if (step + i) % 3:
                p.grad = g
                references[i].step(g, **OPTIONS)
        optimizer.step()
        optimizer.zero_grad()
    for p, reference in zip(params, references, strict=True):
        assert optimizer.state[p]["step"] == reference.t
        assert torch.equal(p.msamp_state.codes, reference.master[0])


# ---- clipping


def test_clipping_changes_only_the_inv_scale_of_scaled_gradients():
    params, plain = scaled_params("O2"), nn.Parameter(torch.zeros(3))
    optimizer = ScaledAdamW([*params, plain], level="O2")
    give(params, 0, coded=True)
    plain.grad = torch.full((3,), 2.0)
    before = [(p.grad.codes.clone(), p.grad.inv_scale.clone()) for p in params]
    values = torch.cat([*((c.float() * i).flatten() for c, i in before), plain.grad])
    norm = nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.5)
    assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-6)
    for p, (codes, inv_scale) in zip(params, before, strict=True):
        assert torch.equal(p.grad.codes.float(), codes.float())
        assert p.grad.inv_scale.item() == pytest.approx(inv_scale.item() * 0.5 / norm.item(), rel=1e-5)
    assert plain.grad[0].item() == pytest.approx(2 * 0.5 / norm.item(), rel=1e-5)
    inv_scales = [p.grad.inv_scale.item() for p in params]
    assert nn.utils.clip_grad_norm_(parameters_of(optimizer), 1e9).item() == pytest.approx(0.5, rel=1e-5)
    assert [p.grad.inv_scale.item() for p in params] == inv_scales


# ---- memory


@pytest.mark.parametrize(("level", "allowed"), [("O1", 11.1), ("O2", 6.1), ("O3", 7.1)])
def test_bytes_per_parameter(level, allowed):
    (p,) = scaled_params(level, [torch.randn(256, 256)])
    optimizer = ScaledAdamW([p], level=level)
    accumulate(p, torch.randn(256, 256))
    optimizer.step()
    assert bytes_at_rest(p, optimizer) <= allowed
