"""The loss is scaled exactly once, on every way from a loss to its gradients."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from contract_models import Batches, Probe, X, fabric_probe, fabric_with, same, scale_of, trainer_with
from plugins_under_test import HALF_GRADIENTS, every_plugin, every_scaled, every_unscaled, make
from torch import Tensor


class GradientNotes(Probe):
    """Notes the gradient of ``w`` after each backward and before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.after_backward: list[Tensor] = []
        self.before_step: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.after_backward.append(self.w.grad.clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self.w.grad.clone())


@every_scaled
def test_scaled_plugins_do_scale(name: str) -> None:
    # the default of torch.amp.GradScaler, or what the suite gives to plugins with fp16 gradients
    assert scale_of(make(name)) == (8.0 if name in HALF_GRADIENTS else 2.0**16)


class ManualProbe(GradientNotes):
    """Runs ``loss``, ``backward`` arguments and the step by hand."""

    def __init__(self, train: Callable[["ManualProbe", Any, Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.train_by_hand = train

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.train_by_hand(self, optimizer, batch)


def by_hand(probe: ManualProbe, optimizer: Any, batch: Tensor) -> None:
    probe.manual_backward(probe(batch))
    optimizer.step()


@every_plugin
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_trainer_scales_once_and_unscales_before_the_step(name: str, manual: bool) -> None:
    plugin, probe = make(name), ManualProbe(by_hand) if manual else GradientNotes()
    scale = scale_of(plugin)
    trainer_with(plugin).fit(probe, Batches(X))
    assert same(torch.stack(probe.after_backward), X[None] * scale)
    assert same(torch.stack(probe.before_step), X[None])
    assert same(probe.w, -X)


@every_plugin
def test_manual_backward_forwards_arguments(name: str) -> None:
    """``retain_graph=True`` allows a second backward, and a positional ``gradient`` weights a vector of losses."""

    def train(probe: ManualProbe, optimizer: Any, batch: Tensor) -> None:
        loss = probe(batch).exp()  # exp(0) = 1 keeps the gradient, and a freed graph cannot go backward again
        probe.manual_backward(loss, retain_graph=True)
        probe.manual_backward(loss)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            probe.manual_backward(loss)
        probe.manual_backward(probe.w * batch, torch.tensor([10.0, 100.0]))
        optimizer.step()

    plugin, probe = make(name), ManualProbe(train)
    trainer_with(plugin).fit(probe, Batches(X))
    assert same(probe.w, -(2 * X + X * torch.tensor([10.0, 100.0])))


class HookCalls(L.Callback):
    """Counts the calls of the hooks that ``pre_backward`` and ``post_backward`` have to run."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_backward(self, *args: Any) -> None:
        self.calls.append("callback before")

    def on_after_backward(self, *args: Any) -> None:
        self.calls.append("callback after")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls.append("callback step")


class HookedProbe(Probe):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def on_before_backward(self, loss: Tensor) -> None:
        assert self.w.grad is None
        self.calls.append("module before")

    def on_after_backward(self) -> None:
        assert self.w.grad is not None
        self.calls.append("module after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("module step")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(loss, *args, **kwargs)


@every_plugin
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_hooks_around_backward_run_once_each(name: str, manual: bool) -> None:
    callback = HookCalls()
    probe = HookedProbe(callback.calls)
    if manual:
        probe.automatic_optimization = False

        def training_step(batch: Tensor, batch_idx: int) -> None:
            probe.manual_backward(probe(batch))
            probe.optimizers().step()

        probe.training_step = training_step
    trainer_with(make(name), callbacks=[callback]).fit(probe, Batches(X))
    around = ["callback before", "module before", "backward", "callback after", "module after"]
    assert callback.calls == [*around, "callback step", "module step"]


@every_plugin
def test_training_step_that_returns_a_dict_or_logs_sees_the_unscaled_loss(name: str) -> None:
    class LoggingProbe(Probe):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            loss = self(batch) + 1.5
            self.log("loss", loss)
            return {"loss": loss, "extra": batch}

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.returned = outputs["loss"]

    trainer, probe = trainer_with(make(name)), LoggingProbe()
    trainer.fit(probe, Batches(X))
    assert trainer.callback_metrics["loss"] == 1.5
    assert same(probe.w, -X)


@every_plugin
def test_fabric_backward_scales_once_and_forwards_arguments(name: str) -> None:
    plugin = make(name)
    fabric, module, optimizer, probe, _ = fabric_probe(plugin)
    loss = module(X).exp()
    fabric.backward(loss, retain_graph=True)
    assert same(probe.w.grad, X * scale_of(plugin))
    fabric.backward(loss, model=module)
    assert same(probe.w.grad, 2 * X * scale_of(plugin))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fabric.backward(loss)
    fabric.backward(probe.w * X, torch.tensor([10.0, 100.0]))
    optimizer.step()
    assert same(probe.w, -(2 * X + X * torch.tensor([10.0, 100.0])))


@every_unscaled
def test_fabric_allows_plain_backward_where_nothing_is_scaled(name: str) -> None:
    _, module, optimizer, probe, _ = fabric_probe(make(name))
    module(X).backward()
    optimizer.step()
    assert same(probe.w, -X)


@every_scaled
def test_fabric_refuses_plain_backward_where_the_loss_is_scaled(name: str) -> None:
    _, module, *_ = fabric_probe(make(name))
    with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss\)"):
        module(X).backward()


@every_plugin
@pytest.mark.parametrize("way", ["fabric.backward", "manual_backward"])
def test_lightning_module_inside_fabric_scales_once(name: str, way: str) -> None:
    plugin, probe = make(name), Probe()
    fabric = fabric_with(plugin)
    module, optimizer = fabric.setup(probe, probe.configure_optimizers())
    loss = module.training_step(X, 0)
    (fabric.backward if way == "fabric.backward" else module.manual_backward)(loss)
    assert same(probe.w.grad, X * scale_of(plugin))
    optimizer.step()
    assert same(probe.w, -X)
    assert len(probe.optimizer.calls) == 1
