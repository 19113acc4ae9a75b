"""The loss scale's configuration, trajectory and state, against ``torch.amp.GradScaler("cpu")`` and arithmetic."""

import math
import random

import pytest
import torch
from torch import nn

from lightning_lowprec.precision.loss_scale import LossScale, LossScaler
from tests.precision.scaling_loops import INF, NAN, X, sgd, train

# ---- configuration


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("initial", 0.5, "at least floor=1.0"),
        ("initial", NAN, "finite"),
        ("initial", INF, "finite"),
        ("growth_factor", 0.99, "at least 1.0"),
        ("growth_factor", INF, "finite"),
        ("backoff_factor", 0.0, r"in \(0, 1\]"),
        ("backoff_factor", 1.01, r"in \(0, 1\]"),
        ("growth_interval", 0, "at least 1"),
        ("growth_interval", 2.5, "an integer"),  # it is counted up to, so it would never be reached
        ("floor", 0.0, "above 0"),
        ("floor", -1.0, "above 0"),
        ("patience_at_floor", 0, "at least 1"),
        ("hysteresis", 0, "an integer of at least 1"),
    ],
)
def test_invalid_field_is_named_with_what_is_allowed(field: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"`{field}={value!r}` is not valid; expected .*{allowed}"):
        LossScale(**{field: value})


def test_of_takes_dynamic_a_number_or_a_loss_scale() -> None:
    given = LossScale(growth_interval=7)
    assert LossScale.of(given) is given
    assert LossScale.of("dynamic") == LossScale()
    assert LossScale.of(128) == LossScale.of(128.0)
    assert LossScale.of(128).initial == 128.0
    assert LossScale.of(0.125).initial == 0.125  # a static scale may be below the default floor


# ---- trajectories


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("growth", "backoff", "interval"), [(2.0, 0.5, 3), (4.0, 0.25, 1), (1.5, 0.7, 2), (2.0, 0.5, 50)]
)
def test_trajectory_is_that_of_grad_scaler(seed: int, growth: float, backoff: float, interval: int) -> None:
    """Random overflows; powers of two agree exactly, other factors to the float32 in which torch keeps its scale."""
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    exact = growth in (2.0, 4.0)
    ours = LossScaler(LossScale(initial=2.0**40, floor=2.0**-100, **options))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, **options)
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizers = sgd(a), sgd(b)
    chance = random.Random(seed)
    skipped = 0
    for _ in range(100):
        bad = chance.random() < max(0.1, 1 / (interval + 1))  # about as often down as up
        skipped += bad
        x = X * (chance.choice([INF, NAN]) if bad else chance.choice([1.0, -0.5, 2.0]))
        for scaler, optimizer, w in zip((ours, theirs), optimizers, (a, b), strict=True):
            train(scaler, optimizer, (w * x).sum())
        assert math.isclose(ours.get_scale(), theirs.get_scale(), rel_tol=0.0 if exact else 1e-5)
        assert ours.state_dict()["_growth_tracker"] == theirs.state_dict()["_growth_tracker"]
    torch.testing.assert_close(a, b, rtol=0.0 if exact else 1e-5, atol=0.0)
    assert ours.skipped_steps == skipped > 3


def test_scale_stops_at_the_floor_and_patience_ends_the_run() -> None:
    scaler = LossScaler(LossScale(initial=8.0, floor=3.0, patience_at_floor=4))
    w = nn.Parameter(torch.zeros(2))
    optimizer, scales = sgd(w), []
    for _ in range(5):
        train(scaler, optimizer, (w * INF).sum())
        scales.append(scaler.get_scale())
    assert scales == [4, 3, 3, 3, 3]
    with pytest.raises(FloatingPointError, match=r"^4 steps in a row .* loss scale \(3\)"):
        train(scaler, optimizer, (w * INF).sum())
    assert torch.equal(w, torch.zeros(2))


def test_scale_stops_growing_before_it_leaves_float32() -> None:
    """2^128 is inf in float32: torch's scaler stays at 2^127, and every step is a good one."""
    config = {"growth_interval": 1, "growth_factor": 2.0, "backoff_factor": 0.5}
    ours, theirs = LossScaler(LossScale(initial=2.0**126, **config)), torch.amp.GradScaler("cpu", 2.0**126, **config)
    for scaler in (ours, theirs):
        w = nn.Parameter(torch.zeros(2))
        optimizer = sgd(w)
        for _ in range(4):
            train(scaler, optimizer, (w * 2.0**-100).sum())
        assert scaler.get_scale() == 2.0**127
        assert torch.equal(w, torch.full((2,), -4 * 2.0**-100))


def test_scaled_loss_of_fp16_is_float32() -> None:
    scaler = LossScaler(LossScale(initial=2.0**16))
    scaled = scaler.scale_loss(torch.tensor(3.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled == 3.0 * 2**16  # above 65504, the largest fp16
    assert scaler.scale_loss(torch.tensor([1.0, 2.0], dtype=torch.float64)).dtype == torch.float64


# ---- state


def after_three_steps() -> LossScaler:
    """Scale 4 with one good step counted."""
    scaler, w = LossScaler(LossScale(initial=8.0, growth_interval=2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    for x in (1.0, INF, 1.0):
        train(scaler, optimizer, (w * x).sum())
    return scaler


def test_state_is_exchanged_with_grad_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(after_three_steps().state_dict())
    assert theirs.get_scale() == 4.0
    assert theirs.state_dict()["_growth_tracker"] == 1
    ours = LossScaler(LossScale(growth_interval=7))
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 4.0
    assert ours.state_dict()["_growth_tracker"] == 1
    assert ours.config == LossScale(growth_interval=7)


def test_loaded_scale_is_at_least_the_floor() -> None:
    scaler = LossScaler(LossScale(floor=16.0))
    scaler.load_state_dict(after_three_steps().state_dict())
    assert scaler.get_scale() == 16.0


def test_counted_steps_beyond_the_interval_grow_the_scale_at_the_next_step() -> None:
    """A checkpoint of a run with a longer interval must not leave a counter that never meets the shorter one."""
    scaler, w = LossScaler(LossScale(growth_interval=3)), nn.Parameter(torch.zeros(2))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 1500})
    train(scaler, sgd(w), (w * X).sum())
    assert scaler.get_scale() == 16.0


def test_static_scale_stays_what_the_user_wrote() -> None:
    """A checkpoint of a dynamic run must not replace a scale that can then neither grow nor back off."""
    scaler = LossScaler(LossScale.of(128.0))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**16})
    assert scaler.get_scale() == 128.0


def test_repr_tells_the_scale() -> None:
    text = repr(after_three_steps())
    assert "scale=4" in text
    assert "'growth_interval': 2" in text


# ---- hysteresis, as in Megatron's DynamicGradScaler (trajectories by hand)


def trajectory(config: LossScale, overflows: str) -> list[float]:
    """The scale after each step of a run; `x` is an overflow, `.` a good step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler, scales = torch.optim.SGD([weight], lr=0.0), LossScaler(config), []
    for step in overflows:
        optimizer.zero_grad()
        scaler.scale_loss(weight.sum() * (INF if step == "x" else 1.0)).backward()
        scaler.step(optimizer)
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("hysteresis", "overflows", "expected"),
    [
        (1, "x.x", [32, 32, 16]),
        (2, "x.x", [64, 64, 32]),
        (2, "x.xx", [64, 64, 32, 16]),  # exhausted: every further overflow backs off; a good step forgives nothing
        (2, "xx...x.x", [64, 32, 32, 32, 64, 64, 64, 32]),  # growth (interval 3) starts the count anew
        (3, "xxxx", [64, 64, 32, 16]),
    ],
)
def test_the_first_overflows_are_forgiven(hysteresis: int, overflows: str, expected: list[float]) -> None:
    assert trajectory(LossScale(initial=64.0, growth_interval=3, hysteresis=hysteresis), overflows) == expected


def test_the_count_of_overflows_survives_a_checkpoint() -> None:
    config = LossScale(initial=64.0, hysteresis=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer, first = torch.optim.SGD([weight], lr=0.0), LossScaler(config)
    first.scale_loss(weight.sum() * NAN).backward()
    first.step(optimizer)
    second = LossScaler(config)
    second.load_state_dict(first.state_dict())
    assert (second.scale, second.skipped_steps) == (64.0, 1)
    second.scale_loss(weight.sum() * NAN).backward()
    second.step(optimizer)
    assert (second.scale, second.skipped_steps) == (32.0, 2)
