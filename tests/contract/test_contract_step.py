"""One step per batch, on unscaled gradients, with the user's arguments; no step where there is nothing to step on."""

from typing import Any

import pytest
import torch
from contract_models import (
    Batches,
    CountingSGD,
    Net,
    Probe,
    X,
    assert_same_tensors,
    fabric_probe,
    fabric_with,
    net,
    random_batches,
    same,
    scale_of,
    trainer_with,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from plugins_under_test import every_plugin, every_scaled, every_unscaled, make
from torch import Tensor

from tests.precision.weights_left import as_trained

Y = torch.tensor([-8.0, 2.0])


@every_plugin
def test_trainer_accumulates(name: str) -> None:
    """Lightning divides each loss by the number of accumulated batches."""
    probe = Probe()
    trainer_with(make(name), accumulate_grad_batches=2).fit(probe, Batches(X, Y, Y, Y))
    assert len(probe.optimizer.calls) == 2
    assert same(probe.w, -((X + Y) / 2 + Y))


@every_plugin
def test_fabric_accumulates(name: str) -> None:
    fabric, module, optimizer, probe, raw = fabric_probe(make(name))
    for i, batch in enumerate((X, Y, Y, Y)):
        fabric.backward(module(batch))
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(raw.calls) == 2
    assert same(probe.w, -(X + 3 * Y))


class SometimesNone(Probe):
    """Skips every second batch; notes what the step hook sees."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else self(batch)


@every_plugin
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_training_step_that_returns_none_skips_the_step(name: str) -> None:
    plugin, probe = make(name), SometimesNone()
    trainer_with(plugin).fit(probe, Batches(X, Y, X, Y))
    assert same(probe.w, -2 * X)
    if plugin.scaler is not None:
        assert len(probe.optimizer.calls) == 2
        assert plugin.scaler.state_dict()["_growth_tracker"] == 2  # a batch without a loss is no good step
        assert plugin.scaler.skipped_steps == 0  # and no overflow


class StepArguments(Probe):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, flavour="sour", number=batch_idx)


@every_plugin
def test_trainer_passes_step_arguments_through(name: str) -> None:
    probe = StepArguments()
    trainer_with(make(name)).fit(probe, Batches(X, Y))
    assert probe.optimizer.calls == [{"flavour": "sour", "number": 0}, {"flavour": "sour", "number": 1}]
    assert same(probe.w, -(X + Y))


@every_plugin
def test_plugin_passes_step_arguments_through_without_a_trainer(name: str) -> None:
    """What Fabric's strategies may add."""
    plugin, probe = make(name), Probe()
    optimizer = CountingSGD(probe.parameters())
    probe.w.grad = X * scale_of(plugin)
    plugin.optimizer_step(optimizer, flavour="salty")
    assert optimizer.calls == [{"flavour": "salty"}]
    assert same(probe.w, -X)


@every_plugin
def test_fabric_step_runs_a_closure_once_and_returns_its_result(name: str) -> None:
    plugin = make(name)
    fabric, module, optimizer, probe, raw = fabric_probe(plugin)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(X) + 2.5
        fabric.backward(loss)
        calls.append(probe.w.grad.clone())
        return loss

    assert optimizer.step(closure) == 2.5
    assert same(torch.stack(calls), X[None] * scale_of(plugin))
    assert len(raw.calls) == 1
    assert same(probe.w, -X)


@every_plugin
def test_manual_step_runs_a_closure_once_and_passes_arguments_through(name: str) -> None:
    class Manual(Probe):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> None:
                optimizer.zero_grad()
                self.manual_backward(self(batch))

            if batch_idx:
                closure()
            optimizer.step(flavour="sweet", **({} if batch_idx else {"closure": closure}))

    probe = Manual()
    probe.automatic_optimization = False
    trainer_with(make(name)).fit(probe, Batches(X, Y))
    assert probe.optimizer.calls == [{"flavour": "sweet"}] * 2
    assert same(probe.w, -(X + Y))


class StepsTwice(Net):
    """Two steps on every batch, inside one ``training_step`` and so inside one autocast context."""

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch))
            self.optimizers().step()


@every_plugin
def test_second_forward_in_a_training_step_sees_the_stepped_weights(name: str) -> None:
    """A cache of half-precision weights would show it the old ones."""
    (batch,) = random_batches(1)
    twice, once = net(StepsTwice), net()
    twice.automatic_optimization = False
    trainer_with(make(name)).fit(twice, Batches(batch))
    trainer_with(make(name)).fit(once, Batches(batch, batch))
    assert once.losses[0] != once.losses[1]
    assert_same_tensors(twice.losses, once.losses)
    assert_same_tensors(twice.state_dict(), once.state_dict())


# ---- LBFGS, whose reference is the same loop in plain torch

TARGET = torch.tensor([1.5, -2.0])


def quadratic(w: Tensor, target: Tensor) -> Tensor:
    return ((w - target) ** 2 * torch.tensor([1.0, 4.0])).sum()


def lbfgs(params: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4)


def plain_lbfgs(steps: int) -> tuple[Tensor, int]:
    """The weights and the number of closure calls after some steps of plain torch."""
    w, calls = torch.zeros(2, requires_grad=True), 0
    optimizer = lbfgs([w])

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = quadratic(w, TARGET)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return w.detach(), calls


class LBFGSProbe(Probe):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, target: Tensor) -> Tensor:
        self.calls += 1
        return quadratic(self.w, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lbfgs([self.w])


def refuses_lbfgs(name: str) -> bool:
    """Whether the plugin has masters, and raises."""
    if make(name).masters is None:
        return False
    with pytest.raises(TypeError, match=r"^LBFGS evaluates its closure where .*`bf16-mixed`.*`torch.optim.AdamW`"):
        trainer_with(make(name)).fit(LBFGSProbe(), Batches(TARGET))
    return True


@every_unscaled
def test_lbfgs_in_the_trainer_equals_plain_torch(name: str) -> None:
    if refuses_lbfgs(name):
        return
    probe = LBFGSProbe()
    trainer_with(as_trained(make(name))).fit(probe, Batches(TARGET, TARGET))
    w, calls = plain_lbfgs(2)
    assert same(probe.w, w)
    assert probe.calls == calls > 2


@every_unscaled
def test_lbfgs_in_fabric_equals_plain_torch(name: str) -> None:
    if refuses_lbfgs(name):
        return
    probe, fabric = LBFGSProbe(), fabric_with(make(name))
    module, optimizer = fabric.setup(probe, probe.configure_optimizers())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(TARGET)
        fabric.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    w, calls = plain_lbfgs(2)
    assert same(probe.w, w)
    assert probe.calls == calls > 2


@every_scaled
def test_lbfgs_with_a_scaled_loss_raises(name: str) -> None:
    if refuses_lbfgs(name):
        return
    plugin = make(name)
    message = f"precision='{plugin.precision}'.*LBFGS.*bf16"
    with pytest.raises(MisconfigurationException, match=message):
        trainer_with(plugin).fit(LBFGSProbe(), Batches(TARGET))
    fabric, probe = fabric_with(make(name)), LBFGSProbe()
    module, optimizer = fabric.setup(probe, probe.configure_optimizers())
    fabric.backward(module(TARGET))
    with pytest.raises(MisconfigurationException, match=message):
        optimizer.step(lambda: module(TARGET))
