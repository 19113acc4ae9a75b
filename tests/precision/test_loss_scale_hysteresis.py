"""Hysteresis: the first overflows are forgiven, as in Megatron's DynamicGradScaler (trajectories by hand)."""

import pytest
import torch

from lightning_lowprec.precision.loss_scale import LossScale, LossScaler


def trajectory(config: LossScale, overflows: str) -> list[float]:
    """The scale after each step of a run; `x` is an overflow, `.` a good step."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler, scales = torch.optim.SGD([weight], lr=0.0), LossScaler(config), []
    for step in overflows:
        optimizer.zero_grad()
        scaler.scale_loss(weight.sum() * (float("inf") if step == "x" else 1.0)).backward()
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
def test_trajectory(hysteresis, overflows, expected):
    assert trajectory(LossScale(initial=64.0, growth_interval=3, hysteresis=hysteresis), overflows) == expected


def test_the_count_survives_a_checkpoint():
    config = LossScale(initial=64.0, hysteresis=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, first = torch.optim.SGD([weight], lr=0.0), LossScaler(config)
    first.scale_loss(weight.sum() * float("nan")).backward()
    first.step(optimizer)
    second = LossScaler(config)
    second.load_state_dict(first.state_dict())
    assert (second.scale, second.skipped_steps) == (64.0, 1)
    second.scale_loss(weight.sum() * float("nan")).backward()
    second.step(optimizer)
    assert (second.scale, second.skipped_steps) == (32.0, 2)


def test_validation():
    with pytest.raises(ValueError, match=r"`hysteresis=0` is not valid; expected an integer of at least 1\."):
        LossScale(hysteresis=0)
