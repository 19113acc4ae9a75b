"""What the loss scaler does to gradients, its own optimizer's and those that another one still holds."""

import gc

import pytest
import torch
from torch import nn

from lightning_lowprec.precision.loss_scale import LossScale, LossScaler
from tests.precision.scaling_loops import INF, X, sgd, train

# ---- gradients


def test_unscale_divides_once_and_says_whether_all_are_finite() -> None:
    scaler = LossScaler(LossScale(initial=1024.0))
    w, v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    good, bad = sgd(w), sgd(v)
    scaler.scale_loss((w * X).sum() + (v * INF).sum()).backward()
    for _ in range(2):
        scaler.unscale(good)
        scaler.unscale(bad)
    assert torch.equal(w.grad, X)
    assert not scaler.found_inf(good)
    assert scaler.found_inf(bad)


def test_gradients_are_divided_under_any_default_dtype() -> None:
    """torch divides by a float32 tensor alone."""
    scaler, w = LossScaler(LossScale(initial=1024.0)), nn.Parameter(torch.zeros(2))
    torch.set_default_dtype(torch.float64)
    try:
        scaler.scale_loss((w * X).sum()).backward()
        scaler.step(sgd(w))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(w, -X)


@pytest.mark.parametrize(("overflow", "factor"), [(False, 4.0), (True, 0.25)])
def test_pending_gradients_of_another_optimizer_follow_the_scale(overflow: bool, factor: float) -> None:
    """The invariant of the module: a gradient that is not unscaled yet carries the current scale."""
    scaler = LossScaler(LossScale(initial=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1))
    w, v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    first, second = sgd(w), sgd(v)
    for optimizer in (first, second):
        scaler.watch(optimizer)
    scaler.scale_loss((w * (INF if overflow else 1.0)).sum() + (v * X).sum()).backward()
    scaler.step(first)
    assert scaler.get_scale() == 16.0 * factor
    assert torch.equal(v.grad, X * 16.0 * factor)
    scaler.scale_loss((v * X).sum()).backward()  # accumulates under the new scale
    scaler.step(second)
    assert torch.equal(v, -2 * X)


def test_clip_then_another_backward() -> None:
    """Gradients unscaled for clipping go back to the scale when more is accumulated onto them."""
    scaler, w = LossScaler(LossScale(initial=1024.0)), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    scaler.scale_loss((w * X).sum()).backward()
    scaler.unscale(optimizer)
    nn.utils.clip_grad_value_([w], 3.5)
    scaler.scale_loss((w * X).sum()).backward()
    assert torch.equal(w.grad, torch.tensor([6.0, 7.5]) * 1024)
    scaler.step(optimizer)
    assert torch.equal(w, torch.tensor([-6.0, -7.5]))


@pytest.mark.parametrize(
    ("factors", "finite"),
    [([1.0, 2.0, 8.0], True), ([1.0, 2.0, INF], False), ([1.5e38, 1.5e38, 8.0], False)],
    ids=["finite", "inf", "inf as a sum"],
)
def test_sparse_gradients(factors: list[float], finite: bool) -> None:
    """Row 1 occurs twice, so its gradient is a sum; the reference is the same step with a dense gradient."""
    results = []
    for sparse in (True, False):
        table = nn.Embedding(4, 2, sparse=sparse)
        nn.init.zeros_(table.weight)
        scaler = LossScaler(LossScale(initial=2.0))  # 2 * 1.5e38 is finite in float32, the sum of two is not
        train(scaler, sgd(table.weight), (table(torch.tensor([1, 1, 3])) * torch.tensor(factors)[:, None]).sum())
        results.append((table.weight.detach(), scaler.get_scale()))
    expected = torch.tensor([[0.0] * 2, [-3.0] * 2, [0.0] * 2, [-8.0] * 2]) if finite else torch.zeros(4, 2)
    for weight, scale in results:
        assert torch.equal(weight, expected)
        assert scale == (2.0 if finite else 1.0)


def test_pending_sparse_gradients_follow_the_scale() -> None:
    table, w = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.zeros(2))
    nn.init.zeros_(table.weight)
    scaler, first, second = LossScaler(LossScale(initial=64.0)), sgd(w), sgd(table.weight)
    scaler.watch(second)
    scaler.scale_loss((w * INF).sum() + table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    assert torch.equal(table.weight, -torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]))


def test_optimizers_are_not_kept_alive() -> None:
    scaler, w = LossScaler(LossScale()), nn.Parameter(torch.zeros(2))
    optimizer = sgd(w)
    train(scaler, optimizer, (w * X).sum())
    optimizer.zero_grad()
    scaler.unscale(optimizer)
    del optimizer
    gc.collect()
    assert len(scaler._gradients) == 0
