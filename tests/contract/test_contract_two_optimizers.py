"""Manual optimization with two optimizers, in the Trainer and in Fabric.

Gradients that one optimizer holds while the other one's step changes the loss scale must keep their meaning.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_models import OVERFLOW, Batches, CountingSGD, Probe, X, fabric_with, same, scale_of, trainer_with
from plugins_under_test import every_plugin, every_scaled, make
from torch import Tensor, nn

from lightning_lowprec import LossScale

GROWS_EVERY_STEP = LossScale(initial=8.0, growth_interval=1)


class TwoWeights(Probe):
    """Two losses that share nothing: ``w . x`` and ``v . y``, each with an optimizer of its own."""

    def __init__(self, train: Callable[[Any, Any, Any, tuple[Tensor, Tensor]], None] | None = None) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2))
        self.automatic_optimization = False
        self.train_by_hand = train

    def forward(self, x: Tensor, which: str = "w") -> Tensor:
        return (getattr(self, which) * x).sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.train_by_hand(self, *self.optimizers(), batch)

    def configure_optimizers(self) -> Any:
        self.both = CountingSGD([self.w]), CountingSGD([self.v])
        return self.both


def one_after_the_other(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
    for optimizer, which, x in ((first, "w", batch[0]), (second, "v", batch[1])):
        optimizer.zero_grad()
        module.manual_backward(module(x, which))
        optimizer.step()


def backward_both_then_step_both(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
    for optimizer in (first, second):
        optimizer.zero_grad()
    module.manual_backward(module(batch[0], "w"))
    module.manual_backward(module(batch[1], "v"))
    first.step()
    second.step()


def toggled(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Every loss depends on both weights; toggling keeps the gradient of the other one away."""
    for optimizer, x in ((first, batch[0]), (second, batch[1])):
        module.toggle_optimizer(optimizer)
        module.manual_backward(module(x, "w") + module(x, "v"))
        optimizer.step()
        optimizer.zero_grad()
        module.untoggle_optimizer(optimizer)


def clipped(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Both are clipped by value before either steps; the clipped one goes through another backward."""
    for optimizer, which, x in ((first, "w", batch[0]), (second, "v", batch[1])):
        optimizer.zero_grad()
        module.manual_backward(module(x, which))
        module.clip_gradients(optimizer, gradient_clip_val=3.5, gradient_clip_algorithm="value")
    first.step()
    second.step()


def second_every_other_time(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
    """The second optimizer accumulates two batches while the first one steps, and the scale changes, in between."""
    module.batches = getattr(module, "batches", 0) + 1
    first.zero_grad()
    module.manual_backward(module(batch[0], "w"))
    module.manual_backward(module(batch[1], "v"))
    first.step()
    if module.batches % 2 == 0:
        second.step()
        second.zero_grad()


LOOPS = [one_after_the_other, backward_both_then_step_both, toggled, clipped, second_every_other_time]
every_loop = pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
Y = torch.tensor([-2.0, 1.0])


@every_plugin
@every_loop
@pytest.mark.parametrize("growing", [False, True], ids=["steady", "growing"])
def test_trainer_updates_both_exactly(name: str, loop: Any, growing: bool) -> None:
    module = TwoWeights(loop)
    trainer_with(make(name, GROWS_EVERY_STEP if growing else None)).fit(module, Batches((X, Y), (X, Y)))
    assert same(module.w, -2 * (X if loop is not clipped else X.clamp(max=3.5)))
    assert same(module.v, -2 * Y)
    steps = 1 if loop is second_every_other_time else 2
    assert [len(o.calls) for o in module.both] == [2, steps]


@every_scaled
@every_loop
def test_overflow_of_one_does_not_touch_the_other(name: str, loop: Any) -> None:
    plugin, module = make(name), TwoWeights(loop)
    scale = scale_of(plugin)
    trainer_with(plugin).fit(module, Batches((OVERFLOW, Y), (X, Y)))
    assert same(module.w, -(X if loop is not clipped else X.clamp(max=3.5)))  # the first step is skipped
    assert same(module.v, -2 * Y)
    assert scale_of(plugin) == scale / 2
    assert [len(o.calls) for o in module.both] == [1, 1 if loop is second_every_other_time else 2]


def fabric_pair(plugin: Any) -> tuple[Any, Any, TwoWeights, Any, Any]:
    fabric, raw = fabric_with(plugin), TwoWeights()
    module = fabric.setup(raw)
    first, second = fabric.setup_optimizers(*raw.configure_optimizers())
    return fabric, module, raw, first, second


@every_plugin
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop is not toggled], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("growing", [False, True], ids=["steady", "growing"])
def test_fabric_updates_both_exactly(name: str, loop: Any, growing: bool) -> None:  # toggling needs a Trainer
    _, module, raw, first, second = fabric_pair(make(name, GROWS_EVERY_STEP if growing else None))
    for batch in ((X, Y), (X, Y)):
        loop(module, first, second, batch)
    assert same(raw.w, -2 * (X if loop is not clipped else X.clamp(max=3.5)))
    assert same(raw.v, -2 * Y)


@every_scaled
@pytest.mark.parametrize("warm", [True, False], ids=["later step", "first step"])
def test_fabric_overflow_of_one_leaves_the_pending_gradient_of_the_other_right(name: str, warm: bool) -> None:
    """Before its first step nobody but the strategy has shown an optimizer to the plugin."""
    plugin = make(name)
    _, module, raw, first, second = fabric_pair(plugin)
    scale = scale_of(plugin)
    if warm:
        backward_both_then_step_both(module, first, second, (X, Y))
        with torch.no_grad():
            raw.w.zero_(), raw.v.zero_()
    backward_both_then_step_both(module, first, second, (OVERFLOW, Y))
    assert same(raw.w, torch.zeros(2))
    assert same(raw.v, -Y)
    assert scale_of(plugin) == scale / 2


@every_scaled
def test_fabric_clipped_overflow_is_skipped_though_another_backward_follows(name: str) -> None:
    """As with torch.amp.GradScaler, which remembers per optimizer what ``unscale_`` found until its step."""
    plugin = make(name)
    fabric, module, raw, first, second = fabric_pair(plugin)
    scale = scale_of(plugin)
    for which, optimizer, x in (("w", first, OVERFLOW), ("v", second, Y)):
        fabric.backward(module(x, which))
        fabric.clip_gradients(module, optimizer, max_norm=100.0)
    first.step()
    second.step()
    assert [len(o.calls) for o in raw.both] == [0, 1]
    assert scale_of(plugin) == scale / 2
    assert same(raw.v, -Y)


@every_plugin
def test_two_modules_in_one_fabric(name: str) -> None:
    """As in a GAN: each with an optimizer of its own."""
    plugin = make(name)
    fabric, probes = fabric_with(plugin), (Probe(), Probe())
    modules, optimizers = zip(*(fabric.setup(p, p.configure_optimizers()) for p in probes), strict=True)
    for module, x in zip(modules, (X, Y), strict=True):
        fabric.backward(module(x))
    for optimizer in optimizers:
        optimizer.step()
    assert same(probes[0].w, -X)
    assert same(probes[1].w, -Y)
    assert type(probes[0].linear) is type(probes[1].linear)


@every_plugin
def test_unused_optimizer_is_left_alone(name: str) -> None:
    def only_first(module: Any, first: Any, second: Any, batch: tuple[Tensor, Tensor]) -> None:
        module.manual_backward(module(batch[0], "w"))
        first.step()
        first.zero_grad()

    module = TwoWeights(only_first)
    trainer_with(make(name)).fit(module, Batches((X, Y), (X, Y)))
    assert same(module.w, -2 * X)
    assert same(module.v, torch.zeros(2))
    assert module.both[1].calls == []
