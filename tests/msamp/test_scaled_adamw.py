"""ScaledAdamW against a loop written from the specification, bit for bit; its memory."""

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from lightning_lowprec.msamp.adamw import ScaledAdamW, convert_optimizer_
from tests.msamp.scaled_cases import (
    OPTIONS,
    every_level,
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


# ---- memory
