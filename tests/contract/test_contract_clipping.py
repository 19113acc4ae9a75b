"""Clipping sees unscaled gradients, after ``on_before_optimizer_step``. X = (3, 4) has norm 5."""

from typing import Any

import pytest
import torch
from contract_models import (
    OVERFLOW,
    Batches,
    CountingSGD,
    Probe,
    X,
    assert_same,
    fabric_probe,
    fabric_with,
    same,
    scale_of,
    trainer_with,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from plugins_under_test import every_name, every_plugin, every_scaled, make
from torch import Tensor, nn

from tests.precision.weights_left import as_trained

NORM, VALUE = 0.25, 3.5
# in float64, by the formula of torch.nn.utils.clip_grad_norm_: g * max_norm / (norm + 1e-6)
BY_NORM = torch.tensor([3.0 * NORM / (5.0 + 1e-6), 4.0 * NORM / (5.0 + 1e-6)])
BY_VALUE = torch.tensor([3.0, VALUE])
CASES = [("norm", NORM, BY_NORM), ("value", VALUE, BY_VALUE)]
every_algorithm = pytest.mark.parametrize(("algorithm", "limit", "clipped"), CASES, ids=["norm", "value"])


class StepNotes(Probe):
    """Notes the gradient that ``on_before_optimizer_step`` and the clipping hook see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[float]]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("step hook", self.w.grad.tolist()))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("clip hook", self.w.grad.tolist()))
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


@every_plugin
@every_algorithm
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_clips_unscaled_gradients_after_the_step_hook(
    name: str, algorithm: str, limit: float, clipped: Tensor, accumulated: int
) -> None:
    """Two batches of X average to X."""
    probe = StepNotes()
    options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": accumulated}
    trainer_with(as_trained(make(name)), **options).fit(probe, Batches(*[X] * accumulated))
    assert probe.seen == [("step hook", [3.0, 4.0]), ("clip hook", [3.0, 4.0])]
    assert_same(probe.w.detach(), -clipped, rtol=1e-6, atol=0)


@every_name
@pytest.mark.parametrize("algorithm", list(GradClipAlgorithmType))
@pytest.mark.parametrize("limit", [0, 0.0, -1.0])
def test_limit_of_zero_or_less_is_a_no_op(name: str, algorithm: GradClipAlgorithmType, limit: float) -> None:
    plugin, w = make(name), nn.Parameter(torch.zeros(2))
    scaled = X * scale_of(plugin)
    w.grad = scaled.clone()
    optimizer = CountingSGD([w])
    plugin.clip_gradients(optimizer, limit, algorithm)
    assert same(w.grad, scaled)
    plugin.optimizer_step(optimizer)
    assert same(w, -X)


@every_name
@every_algorithm
def test_plugin_clips_what_is_still_scaled(name: str, algorithm: str, limit: float, clipped: Tensor) -> None:
    """As in manual optimization: clip before anybody has unscaled, twice, then step."""
    plugin, w = make(name), nn.Parameter(torch.zeros(2))
    w.grad = X * scale_of(plugin)
    optimizer = CountingSGD([w])
    for _ in range(2):
        plugin.clip_gradients(optimizer, limit, GradClipAlgorithmType(algorithm))
        assert_same(next(iter(plugin.main_params(optimizer))).grad, clipped, rtol=1e-5, atol=0)
    plugin.optimizer_step(optimizer)
    assert_same(w.detach(), -clipped, rtol=1e-5, atol=0)


@every_plugin
@every_algorithm
def test_manual_clipping_acts_on_unscaled_gradients(name: str, algorithm: str, limit: float, clipped: Tensor) -> None:
    class Manual(Probe):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self(batch))
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
            optimizer.step()

    probe = Manual()
    probe.automatic_optimization = False
    trainer_with(as_trained(make(name))).fit(probe, Batches(X, X))
    assert_same(probe.w.detach(), -2 * clipped, rtol=1e-6, atol=0)


@every_plugin
@every_algorithm
def test_fabric_clips_unscaled_gradients(name: str, algorithm: str, limit: float, clipped: Tensor) -> None:
    fabric, module, optimizer, probe, _ = fabric_probe(make(name))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module(X))
        if algorithm == "norm":
            assert fabric.clip_gradients(module, optimizer, max_norm=limit) == 5.0
        else:
            assert fabric.clip_gradients(module, optimizer, clip_val=limit) is None
        grads = [p.grad for p in fabric.strategy.precision.main_params(optimizer) if p.grad is not None]
        assert_same(grads[0], clipped, rtol=1e-6, atol=0)
        optimizer.step()
    assert_same(probe.w.detach(), -2 * clipped, rtol=1e-6, atol=0)


@every_plugin
@every_algorithm
def test_lightning_module_inside_fabric_clips_unscaled(
    name: str, algorithm: str, limit: float, clipped: Tensor
) -> None:
    probe, fabric = Probe(), fabric_with(make(name))
    module, optimizer = fabric.setup(probe, probe.configure_optimizers())
    fabric.backward(module(X))
    module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    optimizer.step()
    assert_same(probe.w.detach(), -clipped, rtol=1e-6, atol=0)


@every_plugin
def test_clipping_then_another_backward_then_step(name: str) -> None:
    """Accumulation with clipping in between: the second gradient joins the clipped first."""
    fabric, module, optimizer, probe, _ = fabric_probe(make(name))
    fabric.backward(module(X))
    fabric.clip_gradients(module, optimizer, clip_val=VALUE)
    fabric.backward(module(X))
    optimizer.step()
    assert same(probe.w, -(BY_VALUE + X))


@every_plugin
def test_fused_optimizer_is_clipped(name: str) -> None:
    """Fused optimizers can unscale by themselves, which is why Lightning's own plugins refuse to clip for them."""

    class Fused(Probe):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([self.w], lr=1.0, fused=True)

    probe = Fused()
    trainer_with(as_trained(make(name)), gradient_clip_val=NORM).fit(probe, Batches(X))
    assert_same(probe.w.detach(), -BY_NORM, rtol=1e-6, atol=0)


class Wrapping(CountingSGD):
    """Like many look-ahead and layer-wise optimizers: keeps another one in ``optimizer`` and shares its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.optimizer.param_groups = self.param_groups


@every_plugin
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_optimizer_that_wraps_another_is_unscaled_once(name: str, manual: bool) -> None:
    class Wrapped(Probe):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Wrapping([self.w])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            if not manual:
                return self(batch)
            self.manual_backward(self(batch))
            self.clip_gradients(self.optimizers(), gradient_clip_val=NORM, gradient_clip_algorithm="norm")
            self.optimizers().step()
            return None

    probe = Wrapped()
    probe.automatic_optimization = not manual
    trainer_with(as_trained(make(name)), gradient_clip_val=None if manual else NORM).fit(probe, Batches(X))
    assert_same(probe.w.detach(), -BY_NORM, rtol=1e-6, atol=0)


@every_scaled
@every_algorithm
def test_clipping_an_overflow_in_fabric_skips_the_step(
    name: str, algorithm: str, limit: float, clipped: Tensor
) -> None:
    """``error_if_nonfinite=True`` is Fabric's default; an overflow of the scaled loss is no error."""
    plugin = make(name)
    fabric, module, optimizer, probe, raw = fabric_probe(plugin)
    scale = scale_of(plugin)
    for batch, expected in ((OVERFLOW, torch.zeros(2)), (X, -clipped)):
        optimizer.zero_grad()
        fabric.backward(module(batch))
        fabric.clip_gradients(module, optimizer, **{"max_norm" if algorithm == "norm" else "clip_val": limit})
        optimizer.step()
        assert scale_of(plugin) == scale / 2
        assert_same(probe.w.detach(), expected, rtol=1e-6, atol=0)
    assert len(raw.calls) == 1
