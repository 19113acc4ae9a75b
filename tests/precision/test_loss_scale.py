"""The loss scale's configuration, trajectory and state, against ``torch.amp.GradScaler("cpu")`` and arithmetic."""

import math
import random
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_lowprec import HalfMixed, LossScale

X = torch.tensor([3.0, 4.0])
INF, NAN = float("inf"), float("nan")


def sgd(*weights: Tensor) -> torch.optim.SGD:
    return torch.optim.SGD(weights, lr=1.0)


def scaler_of(config: LossScale) -> Any:
    return HalfMixed("fp16", loss_scale=config).scaler


def train(scaler: Any, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    of_torch = isinstance(scaler, torch.amp.GradScaler)
    (scaler.scale if of_torch else scaler.scale_loss)(loss).backward()
    scaler.step(optimizer)
    if of_torch:
        scaler.update()


def trajectory(scaler: Any, steps: str) -> list[float]:
    """Return the scale after each step of a run; `x` is an overflow, `.` a good step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scales = torch.optim.SGD([weight], lr=0.0), []
    for step in steps:
        train(scaler, optimizer, weight.sum() * (INF if step == "x" else 1.0))
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("growth", "backoff", "interval"), [(2.0, 0.5, 3), (4.0, 0.25, 1), (1.5, 0.7, 2), (2.0, 0.5, 50)]
)
def test_trajectory_is_that_of_grad_scaler(seed: int, growth: float, backoff: float, interval: int) -> None:
    """Random overflows; powers of two agree exactly, other factors to the float32 in which torch keeps its scale."""
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    exact = growth in (2.0, 4.0)
    ours = scaler_of(LossScale(initial=2.0**40, floor=2.0**-100, **options))
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


def test_the_scale_stops_at_the_floor_and_before_it_leaves_float32() -> None:
    scaler = scaler_of(LossScale(initial=8.0, floor=3.0, patience_at_floor=4))
    assert trajectory(scaler, "xxxxx") == [4, 3, 3, 3, 3]
    scaler.load_state_dict(scaler.state_dict())  # going back to a checkpoint starts the count anew
    assert trajectory(scaler, "xxx") == [3, 3, 3]
    with pytest.raises(FloatingPointError, match=r"^4 steps in a row .* loss scale \(3\)"):
        trajectory(scaler, "x")
    # 2^128 is inf in float32: torch's scaler stays at 2^127, and every step is a good one
    config = {"growth_interval": 1, "growth_factor": 2.0, "backoff_factor": 0.5}
    ours, theirs = scaler_of(LossScale(initial=2.0**126, **config)), torch.amp.GradScaler("cpu", 2.0**126, **config)
    for scaler in (ours, theirs):
        w = nn.Parameter(torch.zeros(2))
        optimizer = sgd(w)
        for _ in range(4):
            train(scaler, optimizer, (w * 2.0**-100).sum())
        assert scaler.get_scale() == 2.0**127
        assert torch.equal(w, torch.full((2,), -4 * 2.0**-100))


def test_scaled_loss_of_fp16_is_float32() -> None:
    scaler = scaler_of(LossScale(initial=2.0**16))
    scaled = scaler.scale_loss(torch.tensor(3.0, dtype=torch.float16))
    torch.testing.assert_close(scaled, torch.tensor(3.0 * 2**16), rtol=0, atol=0)  # above 65504, the largest fp16
    assert scaler.scale_loss(torch.tensor([1.0, 2.0], dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("config", "loaded", "scale"),
    [
        (LossScale(floor=16.0), {"scale": 4.0}, 16.0),
        # of a run with a longer interval: a counter must not miss the shorter one
        (LossScale(growth_interval=3), {"scale": 8.0, "_growth_tracker": 1500}, 16.0),
        (LossScale.of(0.125), {"scale": 2.0**16}, 0.125),  # static: neither grows nor backs off, and has no floor
        (LossScale(growth_factor=1.0), {"scale": 4.0}, 4.0),  # one that backs off alone goes on
    ],
    ids=["floor", "counter", "static", "falling"],
)
def test_a_loaded_state_obeys_the_configuration(config: LossScale, loaded: dict[str, float], scale: float) -> None:
    scaler = scaler_of(config)
    scaler.load_state_dict({**scaler.state_dict(), **loaded, "skipped_steps": 2})
    assert (trajectory(scaler, "."), scaler.skipped_steps) == ([scale], 2)


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
    """As in Megatron's DynamicGradScaler, by hand; the count of overflows survives a checkpoint at any step."""
    config = LossScale(initial=64.0, growth_interval=3, hysteresis=hysteresis)
    for saved in range(len(overflows)):
        first, second = scaler_of(config), scaler_of(config)
        scales = trajectory(first, overflows[:saved])
        second.load_state_dict(first.state_dict())
        assert scales + trajectory(second, overflows[saved:]) == expected
        assert second.skipped_steps == overflows.count("x")
    of_torch = {**second.state_dict(), **torch.amp.GradScaler("cpu", 64.0, growth_interval=3).state_dict()}
    second.load_state_dict({key: of_torch[key] for key in torch.amp.GradScaler("cpu").state_dict()})
    assert trajectory(second, overflows) == expected


@pytest.mark.parametrize(("overflow", "factor"), [(None, 4.0), (0, 0.25), (1, 0.25), (2, 0.25)])
def test_pending_gradients_of_another_optimizer_follow_the_scale(overflow: int | None, factor: float) -> None:
    """Of weights of three dtypes, whose gradients are looked at and multiplied apart; one of them overflows."""
    scaler = scaler_of(LossScale(initial=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1))
    dtypes = torch.float32, torch.bfloat16, torch.float64
    w, v = ([nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes] for _ in range(2))
    nn.init.zeros_((table := nn.Embedding(4, 2, sparse=True)).weight)
    first, second = sgd(*w), sgd(*v, table.weight)
    for optimizer in (first, second):
        scaler.watch(optimizer)
    losses = [(p * (INF if number == overflow else 1.0)).sum() for number, p in enumerate(w)]
    scaler.scale_loss(sum(losses) + sum((p * X).sum() for p in v) + table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(first)
    assert scaler.get_scale() == 16.0 * factor
    assert all(torch.equal(p.grad.float(), X * 16.0 * factor) for p in v)
    scaler.scale_loss(sum((p * X).sum() for p in v)).backward()  # accumulates under the new scale
    scaler.step(second)
    assert all(torch.equal(p.float(), torch.full((2,), 0.0 if overflow is not None else -1.0)) for p in w)
    assert all(torch.equal(p.float(), -2 * X) for p in v)
    assert torch.equal(table.weight, -torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]))


@pytest.mark.parametrize(
    ("factors", "finite"),
    [([1.0, 2.0, 8.0], True), ([1.0, 2.0, INF], False), ([1.5e38, 1.5e38, 8.0], False)],
    ids=["finite", "inf", "inf as a sum"],
)
def test_sparse_gradients(factors: list[float], finite: bool) -> None:
    expected = torch.tensor([[0.0] * 2, [-3.0] * 2, [0.0] * 2, [-8.0] * 2]) if finite else torch.zeros(4, 2)
    for sparse in (True, False):
        table = nn.Embedding(4, 2, sparse=sparse)
        nn.init.zeros_(table.weight)
        scaler = scaler_of(LossScale(initial=2.0))  # 2 * 1.5e38 is finite in float32, the sum of two is not
        train(scaler, sgd(table.weight), (table(torch.tensor([1, 1, 3])) * torch.tensor(factors)[:, None]).sum())
        assert torch.equal(table.weight, expected)
        assert scaler.get_scale() == (2.0 if finite else 1.0)


@pytest.mark.parametrize("precision", ["fp16-master", "fp8-hybrid-fp16"])
def test_gradients_of_a_loss_that_was_never_scaled_are_refused(precision):
    fabric = L.Fabric(accelerator="cpu", precision=precision)
    model, optimizer = fabric.setup(model := nn.Linear(32, 32), torch.optim.SGD(model.parameters(), 0.1))
    optimizer.step()  # without gradients
    for _ in range(2):  # gradients of two backward passes are one step
        fabric.backward(model(torch.randn(8, 32)).float().square().mean())
    optimizer.step()
    for p in model.parameters():  # of `loss.backward()` Fabric itself says what to write
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"no loss was scaled since the last step.*`self\.manual_backward\(loss\)`"):
        optimizer.step()
