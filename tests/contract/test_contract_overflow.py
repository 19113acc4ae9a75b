"""Non-finite gradients: a scaled plugin skips the step exactly and lowers the scale, an unscaled one does nothing."""

import pytest
import torch
from contract_models import (
    OVERFLOW,
    Batches,
    Net,
    Probe,
    X,
    fabric_probe,
    fabric_with,
    net,
    random_batches,
    same,
    scale_of,
    trainer_with,
)
from plugins_under_test import every_scaled, every_unscaled, make
from torch import Tensor

from lightning_lowprec import LossScale

NAN = torch.tensor([float("nan"), 4.0])
PATIENCE = 50
"""Skipped steps at the floor that the default LossScale waits for."""
REMEDY = f"{PATIENCE} steps in a row .*lowest loss scale.*NaN or inf in the data.*learning rate.*bf16"


class Adam(Net):
    """Keeps copies of weights and optimizer state at the end of every batch; one batch is infinite."""

    def on_train_batch_end(self, *args: object) -> None:
        state = [torch.as_tensor(t).clone() for s in self.optimizers().state.values() for t in s.values()]
        self.snapshots.append([*(p.detach().clone() for p in self.parameters()), *state])


@every_scaled
def test_trainer_skips_an_overflowing_step_bit_exactly(name: str) -> None:
    plugin, module = make(name), net(Adam)
    module.snapshots, scale = [], scale_of(plugin)
    good = list(random_batches(3))
    trainer_with(plugin).fit(module, Batches(good[0], torch.full((8, 32), float("inf")), good[1], good[2]))
    before, skipped, *_, last = module.snapshots
    assert len(before) == len(skipped) > len(list(module.parameters()))
    assert all(same(a, b) for a, b in zip(before, skipped, strict=True))
    assert all(torch.isfinite(t.float()).all() for t in last)
    assert not same(last[0], skipped[0])  # training goes on
    assert scale_of(plugin) == scale / 2
    assert plugin.scaler.skipped_steps == 1


@every_scaled
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_skips_an_overflow_with_clipping(name: str, clip: str | None, accumulated: int) -> None:
    """With accumulation, the good batches that share a step with infinite ones are lost too."""
    plugin, probe = make(name), Probe()
    scale, limit = scale_of(plugin), None if clip is None else 100.0
    options = {"gradient_clip_algorithm": clip, "gradient_clip_val": limit, "accumulate_grad_batches": accumulated}
    batches = [batch for first in (X, OVERFLOW, NAN, X) for batch in (first, *[X] * (accumulated - 1))]
    trainer_with(plugin, **options).fit(probe, Batches(*batches))
    assert len(probe.optimizer.calls) == 2
    assert same(probe.w, -2 * X)
    assert scale_of(plugin) == scale / 4


@every_scaled
def test_fabric_skips_an_overflowing_step(name: str) -> None:
    plugin = make(name)
    scale = scale_of(plugin)
    fabric, module, optimizer, probe, raw = fabric_probe(plugin)
    scales = []
    for batch in (X, OVERFLOW, X, NAN, X):
        optimizer.zero_grad()
        fabric.backward(module(batch))
        optimizer.step()
        scales.append(scale_of(plugin))
    assert len(raw.calls) == 3
    assert same(probe.w, -3 * X)
    assert scales == [scale, scale / 2, scale / 2, scale / 4, scale / 4]


@every_scaled
def test_trainer_finds_a_scale_that_fits(name: str) -> None:
    """A scale of 2^40 overflows fp16 activations' gradients; the first steps are skipped until they fit."""
    plugin, module = make(name, LossScale(initial=2.0**40)), net()
    trainer_with(plugin).fit(module, random_batches(40))
    assert 0 < plugin.scaler.skipped_steps < 40
    assert scale_of(plugin) == 2.0 ** (40 - plugin.scaler.skipped_steps)
    assert module.losses[-1] < module.losses[0]


# ---- data in which nothing is finite


@every_scaled
def test_trainer_stops_when_no_scale_helps(name: str) -> None:
    """4 -> 2 -> 1 takes two skipped steps, then the patience begins."""
    plugin, probe = make(name, LossScale(initial=4.0)), Probe()
    with pytest.raises(FloatingPointError, match=REMEDY):
        trainer_with(plugin, max_epochs=10).fit(probe, Batches(*[NAN] * 20))
    assert plugin.scaler.skipped_steps == 2 + PATIENCE
    assert same(probe.w, torch.zeros(2))
    assert probe.optimizer.calls == []


@every_scaled
def test_fabric_stops_when_no_scale_helps(name: str) -> None:
    fabric, module, optimizer, probe, _ = fabric_probe(make(name, LossScale(initial=4.0)))
    for _ in range(1 + PATIENCE):
        fabric.backward(module(NAN))
        optimizer.step()
    fabric.backward(module(NAN))
    with pytest.raises(FloatingPointError, match=REMEDY):
        optimizer.step()
    assert same(probe.w, torch.zeros(2))


@every_scaled
def test_one_good_step_renews_the_patience(name: str) -> None:
    plugin, probe = make(name, LossScale(initial=4.0)), Probe()
    batches = [NAN] * (1 + PATIENCE) + [X] + [NAN] * (PATIENCE - 1) + [X]
    trainer_with(plugin).fit(probe, Batches(*batches))
    assert same(probe.w, -2 * X)


def nan_weights(plugin: object, kind: str) -> Tensor:
    """Which weights of a Net are NaN after a run has seen NaN."""
    module, nan = net(), torch.full((8, 32), float("nan"))
    if kind == "trainer":
        trainer_with(plugin).fit(module, Batches(nan, nan))
    else:
        fabric = fabric_with(plugin)
        wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
        for _ in range(2):
            optimizer.zero_grad()
            fabric.backward(wrapped(nan).sum())
            optimizer.step()
    return torch.cat([p.detach().isnan().flatten() for p in module.parameters()])


@every_unscaled
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_without_scaling_nan_passes_as_in_stock_bf16(name: str, kind: str) -> None:
    expected = nan_weights("bf16-mixed", kind)
    assert expected.any()
    assert same(nan_weights(make(name), kind), expected)
