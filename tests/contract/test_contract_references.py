"""Equality with independent implementations: Lightning's own mixed-precision plugins, bit for bit."""

import itertools
from typing import Any

import lightning.fabric.plugins as fabric_plugins
import lightning.pytorch.plugins as trainer_plugins
import pytest
import torch
from contract_models import Net, fabric_with, net, random_batches, train_in_fabric, trainer_with, value
from plugins_under_test import DISTINCT, make
from torch import Tensor

from lightning_lowprec import HalfMixed, LossScale
from tests.precision.weights_left import as_trained

STEPS = 12
INITIAL, INTERVAL = 2.0**20, 2
"""A scale that overflows fp16 in the first steps and grows again within twelve."""


def fp16() -> HalfMixed:
    return HalfMixed("fp16", loss_scale=LossScale(initial=INITIAL, growth_interval=INTERVAL))


def stock_fp16(plugins: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=INTERVAL)
    return plugins.MixedPrecision("16-mixed", "cpu", scaler)


class ScaleNet(Net):
    """Notes the loss scale after every step. The loss is computed in half precision, outside of autocast's lists."""

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        loss = (self(batch) - batch.flip(-1)).abs().mean(-1).sum()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler
        self.scales.append(None if scaler is None else scaler.get_scale())


def fit(plugin: Any, **options: Any) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    module = net(ScaleNet)
    module.scales = []
    trainer_with(plugin, **options).fit(module, random_batches(STEPS))
    return module.losses, module.scales, [p.detach() for p in module.parameters()]


def assert_equal_runs(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert ours[1] == theirs[1]
    for a, b in zip(ours[2], theirs[2], strict=True):
        assert torch.equal(a, b)


OPTIONS = [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clipped", "accumulated"])
def test_bf16_in_the_trainer(options: dict[str, Any]) -> None:
    assert_equal_runs(fit(HalfMixed("bf16"), **options), fit("bf16-mixed", **options))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clipped", "accumulated"])
def test_fp16_in_the_trainer(options: dict[str, Any]) -> None:
    ours, theirs = fit(fp16(), **options), fit(stock_fp16(trainer_plugins), **options)
    assert_equal_runs(ours, theirs)
    assert_overflows_and_grows(theirs[1])


def assert_overflows_and_grows(scales: list[float]) -> None:
    """The run had what it was chosen for."""
    assert min(scales) < INITIAL
    assert any(a < b for a, b in itertools.pairwise(scales))


def run_in_fabric(plugin: Any) -> tuple[list[float], list[Any], list[Tensor]]:
    fabric, module = fabric_with(plugin), net()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    losses, scales = [], []
    for batch in random_batches(STEPS):
        losses += train_in_fabric(fabric, wrapped, optimizer, [batch])
        scaler = fabric.strategy.precision.scaler
        scales.append(None if scaler is None else scaler.get_scale())
    return losses, scales, [p.detach() for p in module.parameters()]


def test_bf16_in_fabric() -> None:
    assert_equal_runs(run_in_fabric(HalfMixed("bf16")), run_in_fabric("bf16-mixed"))


def test_fp16_in_fabric() -> None:
    ours, theirs = run_in_fabric(fp16()), run_in_fabric(stock_fp16(fabric_plugins))
    assert_equal_runs(ours, theirs)
    assert_overflows_and_grows(theirs[1])


@pytest.mark.slow
def test_no_precision_is_another_one_in_disguise() -> None:
    """Whoever asks for a precision gets it: a few steps under any two of them give different weights."""
    weights = {}
    for name in ("32-true", *DISTINCT):
        parameters = []
        for accumulate in (1, 2):
            torch.manual_seed(6)  # rounding ties, which master and remainder round differently, are rare
            module = Net()
            plugin = as_trained(make(name)) if name in DISTINCT else name
            trainer_with(plugin, accumulate_grad_batches=accumulate).fit(module, random_batches(3))
            parameters += [value(p).flatten() for p in module.parameters()]
        weights[name] = torch.cat(parameters)
    equal = {frozenset(pair) for pair in itertools.combinations(weights, 2) if torch.equal(*map(weights.get, pair))}
    # scales of both are powers of two, and by powers of two e4m3 rounds alike; only values near zero differ
    equal.discard(frozenset({"fp8-rowwise", "mxfp8"}))
    equal.discard(frozenset({"msamp-o2", "msamp-o3"}))  # O3 keeps codes of the same weight, which FSDP2 gathers
    assert equal == {frozenset({"half-auto", "HalfMixed-bf16"})}  # on CPU
