"""The loss scale's configuration, trajectory and state, against ``torch.amp.GradScaler("cpu")`` and arithmetic."""

import copy
import math
import pickle
import random
from typing import Any

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
    ],
)
def test_invalid_field_is_named_with_what_is_allowed(field: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"`{field}={value!r}` is not valid; expected .*{allowed}"):
        LossScale(**{field: value})


def test_defaults_are_those_of_grad_scaler() -> None:
    theirs, ours = torch.amp.GradScaler("cpu"), LossScale()
    assert ours.initial == theirs.get_scale()
    assert ours.growth_factor == theirs.get_growth_factor()
    assert ours.backoff_factor == theirs.get_backoff_factor()
    assert ours.growth_interval == theirs.get_growth_interval()


def test_loss_scale_is_a_frozen_value() -> None:
    assert LossScale(initial=8.0) == LossScale(initial=8.0) != LossScale()
    with pytest.raises(AttributeError):
        LossScale().initial = 2.0
    with pytest.raises(TypeError):
        LossScale(2.0)


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


def test_scale_grows_after_the_interval_and_a_skip_starts_it_again() -> None:
    scaler, w = LossScaler(LossScale(initial=8.0, growth_interval=3)), nn.Parameter(torch.zeros(2))
    optimizer, scales = sgd(w), []
    for x in (X, X, X * INF, X, X, X, X):
        train(scaler, optimizer, (w * x).sum())
        scales.append(scaler.get_scale())
    assert scales == [8, 8, 4, 4, 4, 8, 8]
    assert torch.equal(w, -6 * X)


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


def test_a_good_step_renews_the_patience() -> None:
    scaler = LossScaler(LossScale(initial=1.0, patience_at_floor=3))
    w = nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    for x in (INF, INF, 1.0, INF, INF, 1.0):
        train(scaler, optimizer, (w * x).sum())
    assert torch.equal(w, torch.full((2,), -2.0))


@pytest.mark.parametrize(
    "config", [LossScale.of(128.0), LossScale(initial=128.0, growth_factor=1.0, backoff_factor=1.0)]
)
def test_static_scale_never_moves_but_skips_and_loses_patience(config: LossScale) -> None:
    """There is nowhere to back off to, so ``patience_at_floor`` skipped steps in a row end the run here too."""
    scaler, w = LossScaler(config), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    for x in [X] * 2 + [X * INF] * 49 + [X]:
        train(scaler, optimizer, (w * x).sum())
        assert scaler.get_scale() == 128.0
    assert torch.equal(w, -3 * X)
    for _ in range(49):
        train(scaler, optimizer, (w * INF).sum())
    with pytest.raises(FloatingPointError, match=r"^50 steps in a row"):
        train(scaler, optimizer, (w * INF).sum())


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


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_copy_keeps_the_state_and_forgets_the_optimizers(clone: Any) -> None:
    scaler, w = LossScaler(LossScale(initial=8.0, growth_interval=2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    for x in (1.0, INF, 1.0):
        train(scaler, optimizer, (w * x).sum())
    optimizer.zero_grad()
    scaler.unscale(optimizer)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert copied.skipped_steps == 1
    assert copied.config == scaler.config
    train(copied, optimizer, (w * X).sum())
    assert (copied.get_scale(), scaler.get_scale()) == (8.0, 4.0)  # the copy grew, the original did not


def after_three_steps() -> LossScaler:
    """Scale 4 with one good step counted."""
    scaler, w = LossScaler(LossScale(initial=8.0, growth_interval=2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    for x in (1.0, INF, 1.0):
        train(scaler, optimizer, (w * x).sum())
    return scaler


def test_state_dict_round_trip() -> None:
    state = after_three_steps().state_dict()
    assert all(type(value) in (int, float) for value in state.values())
    fresh = LossScaler(LossScale(growth_interval=2))
    fresh.load_state_dict(state)
    assert fresh.get_scale() == 4.0
    w = nn.Parameter(torch.zeros(2))
    train(fresh, sgd(w), (w * X).sum())
    assert fresh.get_scale() == 8.0  # the counted good step came along


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
