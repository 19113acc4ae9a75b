"""Optimizers of other packages with masters: the losses of the same optimizer under `bf16-mixed`, to the bit."""

import copy
from functools import partial

import lightning as L
import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn

from lightning_lowprec import HalfMixed, plain
from tests.toys import Stack

SCHEDULE_FREE = {
    "AdamW": lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2, warmup_steps=3),
    "SGD": lambda params: schedulefree.SGDScheduleFree(params, lr=0.1),
    "RAdam": lambda params: schedulefree.RAdamScheduleFree(params, lr=1e-2),
}
SAM = partial(pytorch_optimizer.SAM, base_optimizer=torch.optim.SGD, lr=0.5, momentum=0.9)
SGD = partial(torch.optim.SGD, lr=0.1)
EXACT = HalfMixed("bf16", master_weights=True, grad_accumulation_dtype=torch.float32)
"""`bf16-master`, with gradients that are summed in float32, so that losses are those of `bf16-mixed` to the bit."""


def set_up(precision, make):
    asked = {"precision": precision} if isinstance(precision, str) else {"plugins": copy.deepcopy(precision)}
    fabric = L.Fabric(accelerator="cpu", devices=1, **asked)
    net = Stack(lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)), seed=0)
    return fabric, *fabric.setup(net, make(net.parameters()))


def loss_of(model, step):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return (model(x).float() - x.roll(1, 1).tanh()).square().mean()


def losses_of(precision, make, train, steps):
    """``train(fabric, model, optimizer, step)`` yields the losses of a step."""
    world = set_up(precision, make)
    return [loss.item() for step in range(steps) for loss in train(*world, step)]


def one_step(fabric, model, optimizer, step):
    loss = loss_of(model, step % 2)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    yield loss


def schedule_free_step(fabric, model, optimizer, step):
    optimizer.train()
    fabric.backward(loss_of(model, 2 * step))
    if step == 1:
        optimizer.optimizer.register_step_pre_hook(lambda each, *_: each.train())  # within a step: to be sure
    if step % 3 == 0:
        fabric.clip_gradients(model, optimizer, max_norm=1e9)  # moved gradients outlive a move of the weights
        for p in model.parameters():
            p.grad = p.grad / 2
        optimizer.eval()
        yield loss_of(model, 100)
        optimizer.train()
    fabric.backward(loss_of(model, 2 * step + 1))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.eval()
    yield loss_of(model, 101)


def both_steps_of_sam(fabric, model, optimizer, step):
    for move in (optimizer.first_step, optimizer.second_step):
        yield (loss := loss_of(model, step))
        fabric.backward(loss)
        move(zero_grad=True)


@pytest.mark.parametrize("name", ["lion", "lamb", "adopt", "soap", "came", "tiger", "stableadamw", "adamp", "ranger"])
def test_a_step_is_that_of_float32_weights(name):
    make = partial(pytorch_optimizer.load_optimizer(name), lr=1e-2)
    expected = losses_of("bf16-mixed", make, one_step, 12)
    assert expected[-2] != expected[0]
    assert losses_of(EXACT, make, one_step, 12) == expected


@pytest.mark.parametrize(
    ("make", "train"), [*((make, schedule_free_step) for make in SCHEDULE_FREE.values()), (SAM, both_steps_of_sam)]
)
def test_weights_that_move_between_steps_are_masters(make, train):
    expected = losses_of("bf16-mixed", make, train, 8)
    assert len(set(expected)) > len(expected) // 2
    assert losses_of(EXACT, make, train, 8) == expected


def test_without_masters_between_steps_it_is_refused():
    for make, method in ((SCHEDULE_FREE["AdamW"], "AdamWScheduleFree.train"), (SAM, "SAM.first_step")):
        with pytest.raises(TypeError, match=rf"`Fabric{method}` moves the weights between steps.*`bf16-remainder`"):
            getattr(set_up("bf16-sr", make)[2], method.rpartition(".")[2])()


class TwoPhases(torch.optim.Optimizer):
    """As SAM, with names of its own: the optimizer inside steps outside of `step`."""

    def __init__(self, params):
        self.inside = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inside.param_groups, {})

    def finish(self):
        self.inside.step()


def test_an_optimizer_that_steps_outside_or_evaluates_in_its_step_is_refused():
    fabric, model, optimizer = set_up(EXACT, TwoPhases)
    fabric.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match=r"^SGD steps half-precision weights.*inside of another.*`bf16-mixed`"):
        optimizer.finish()
    fabric, model, optimizer = set_up("bf16-mixed", TwoPhases)
    fabric.backward(loss_of(model, 0))
    optimizer.finish()
    fabric, model, optimizer = set_up(EXACT, lambda params: Evaluates(params, lr=0.1))
    optimizer.optimizer.evaluate = lambda: fabric.backward(loss_of(model, 1))
    fabric.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match=r"^Evaluates evaluates its closure where it has moved the weights"):
        optimizer.step()


@pytest.mark.parametrize("name", ["bf16-remainder", "bf16-sr", "bf16-8bit", "fp16-master", "fp8-hybrid-8bit"])
def test_an_optimizer_that_was_not_set_up_is_refused(name):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = fabric.setup(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()  # without gradients
    fabric.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match=r"^SGD steps half-precision weights without.*`fabric\.setup`.*plain\(model"):
        optimizer.step()
    before = [p.detach().clone() for p in plain(model.module).parameters()]
    optimizer.step()
    assert all(p.dtype is torch.float32 and (p - b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_a_precision_of_lightning_steps_what_an_earlier_run_has_left():
    _, model, _ = set_up("bf16-remainder", SGD)
    stock = L.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    model, optimizer = stock.setup(model.module, SGD(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    stock.backward(loss_of(model, 0))
    optimizer.step()
    assert any((p - b).any() for p, b in zip(model.parameters(), before, strict=True))


class Evaluates(torch.optim.SGD):
    """Moves the weights, and lets the model compute gradients there, without a closure: GSAM is such an optimizer."""

    def step(self, closure=None):
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(0.1)
        self.evaluate()
        return super().step()


FlashAdamW = type("FlashAdamW", (type("FlashOptimizer", (torch.optim.SGD,), {}),), {})
"""Has the names of FlashOptim's classes, which have no kernels for a CPU."""


@pytest.mark.parametrize("name", ["bf16-remainder", "bf16-8bit", "bf16-sr", "fp8-hybrid-remainder"])
def test_it_steps_the_half_weights_without_masters_of_ours(name, caplog):
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with caplog.at_level("INFO"):
        module, optimizer = fabric.setup(model, FlashAdamW(model.parameters(), lr=1.0))
        for _ in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            fabric.backward(module(torch.randn(8, 64)).square().mean())
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            expected = [w - g for w, g in zip(before, grads, strict=True)]
            assert all(map(torch.equal, [p.detach() for p in model.parameters()], expected))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert type(optimizer.optimizer) is FlashAdamW
    assert caplog.text.count("FlashAdamW of FlashOptim keeps masters and moments itself") == 1
