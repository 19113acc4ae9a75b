"""Every order of a few operations on one model, each operation checked against float32.

``python -m tests.contract.orders LENGTH [NAME ...]``; length 5 takes about 4 minutes per name.

After every operation the model must compute with its weights as they are, whoever wrote them:

* the output of a forward is that of float32 products with the weights of this moment;
* the gradients of a backward are those of float32, and it multiplies by the weights of its forward, or of this moment;
* a write arrives in the weights, and the next optimizer step starts from there.
"""

import copy
import logging
import sys
import threading
import warnings
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn

from lightning_lowprec import LossScale
from tests.representatives import TABLE, names_on_cpu

WIDTH = 32
LR = 0.1
OUTPUT_ERROR, GRADIENT_ERROR, WEIGHT_ERROR = 0.12, 0.2, 0.07
FOUR_BITS = 2.5
"""How much more outputs and gradients of 4-bit codes may be off: half a step of e2m1 is up to a fifth of a value."""
"""Relative errors, of norms: two products of FP8 (e5m2 in the backward: 3 bits), and one rounding to e4m3. A weight
that is not seen gives errors above 0.5, since all writes draw new weights."""
IN_PLACE = "modified by an inplace operation"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def loss_of(out: Tensor, x: Tensor) -> Tensor:
    """Linear in the output, so that an error of the output is no error of the gradients."""
    return (out.float() * x.flip(-1)).sum() / len(x)


def fabric_of(precision: str) -> L.Fabric:
    if "fp16" not in precision:
        return L.Fabric(accelerator="cpu", devices=1, precision=precision)
    row = TABLE[precision]
    plugin = row.plugin(**row.options, loss_scale=LossScale(initial=8.0, growth_interval=10**6))
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin)


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()


def stepper(precision: str, net: nn.Module) -> torch.optim.Optimizer:
    """SGD; MS-AMP takes Adam, whose step without memory is ``LR * g / (1 + |g| / 1e4)``."""
    if precision.startswith("msamp"):
        return torch.optim.Adam(net.parameters(), LR * 1e4, betas=(0.0, 0.0), eps=1e4)
    return torch.optim.SGD(net.parameters(), LR)


class World:
    """A network that trains, a frozen copy of it, and another model with its own optimizer."""

    def __init__(self, precision: str) -> None:
        self.coarse = FOUR_BITS if precision.startswith("nvfp4") else 1.0
        self.draws = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.fabric = fabric_of(precision)
        self.net = network()
        both = nn.ModuleDict({"net": self.net, "target": copy.deepcopy(self.net).requires_grad_(False)})
        self.target = both["target"]
        self.fabric.setup_module(both)
        self.optimizer = self.fabric.setup_optimizers(stepper(precision, self.net))
        self.scale = 8.0 if "fp16" in precision else 1.0
        self.other_fabric = fabric_of(precision)
        self.other = network()
        other = self.other_fabric.setup_module(self.other)
        self.others = self.other_fabric.setup_optimizers(stepper(precision, other))
        self.pending: list[tuple[Tensor, Tensor, list[Tensor]]] = []

    def values(self, module: nn.Module) -> list[Tensor]:
        """Copies of the weights, in float32."""
        return [p.detach().float().clone() for p in module.parameters()]

    def gradients(self) -> list[Tensor]:
        """Copies of the gradients, in float32; zeros where there is none."""
        grads = [torch.zeros(p.shape) if p.grad is None else p.grad.detach() for p in self.net.parameters()]
        return [grad.float() / self.scale for grad in grads]

    def drawn(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.draws) / WIDTH**0.5

    # ---- operations

    def forward(self) -> None:
        x = torch.randn(16, WIDTH, generator=self.draws)
        with self.fabric.autocast():
            out = self.net(self.cast(x))
        self.check_output(out, x, self.net)
        self.pending.append((loss_of(out, x), x, self.values(self.net)))

    def backward(self) -> None:
        if not self.pending:
            return
        loss, x, then = self.pending.pop(0)
        before = self.gradients()
        now = self.values(self.net)
        refused = ""
        try:
            self.fabric.backward(loss)
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert IN_PLACE in refused  # as in torch itself
            assert any(not torch.equal(a, b) for a, b in zip(now, then, strict=True))
            self.optimizer.zero_grad()
            return
        found = [a - b for a, b in zip(self.gradients(), before, strict=True)]
        norm = max(b.norm() for b in before)
        errors = []
        for read in (then, now):
            pairs = zip(found, gradients(then, read, x), strict=True)
            # a sum of gradients may be kept in half precision: its rounding is that of the sum
            errors.append(max(((f - e).norm() / (e.norm() + 0.1 * norm)).item() for f, e in pairs))
        assert min(errors) < GRADIENT_ERROR * self.coarse, f"gradients are off by {errors}"

    def step(self) -> None:
        before = self.values(self.net)
        expected = [w - LR * grad for w, grad in zip(before, self.gradients(), strict=True)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.check_weights(self.net, expected)

    def step_by_hand(self) -> None:
        expected = [w - LR * grad for w, grad in zip(self.values(self.net), self.gradients(), strict=True)]
        for p in self.net.parameters():
            if p.grad is not None and self.scale == 1:
                p.data.sub_(LR * p.grad.data)
        if self.scale == 1:
            self.check_weights(self.net, expected)
        self.optimizer.zero_grad()

    def write_data(self) -> None:
        self.write(lambda p, value: p.data.mul_(0).add_(value))

    def copy(self) -> None:
        self.write(lambda p, value: p.copy_(value))

    def replace_data(self) -> None:
        self.write(lambda p, value: setattr(p, "data", value.to(p.dtype)))

    def load(self) -> None:
        state = {name: self.drawn(value) for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(state)
        self.check_weights(self.net, list(state.values()))

    def average(self) -> None:
        expected = []
        for t, p in zip(self.target.parameters(), self.net.parameters(), strict=True):
            expected.append(0.5 * t.detach().float() + 0.5 * p.detach().float())
            t.data.mul_(0.5).add_(p.data.to(t.dtype), alpha=0.5)
        self.check_weights(self.target, expected)
        self.evaluated(self.target)

    def evaluate(self) -> None:
        self.net.eval()
        self.evaluated(self.net)
        self.net.train()

    def train_other(self) -> None:
        with self.other_fabric.autocast():
            loss = self.other(self.cast(torch.randn(16, WIDTH, generator=self.draws))).float().square().mean()
        self.other_fabric.backward(loss)
        self.others.step()
        self.others.zero_grad()

    def train_other_in_a_thread(self) -> None:
        thread = threading.Thread(target=self.train_other)
        thread.start()
        thread.join()

    # ---- parts of operations

    def cast(self, x: Tensor) -> Tensor:
        return x.to(next(self.net.parameters()).dtype)

    @torch.no_grad()
    def write(self, change: Callable[[Tensor, Tensor], object]) -> None:
        expected = [self.drawn(p) for p in self.net.parameters()]
        for p, value in zip(self.net.parameters(), expected, strict=True):
            change(p, value)
        self.check_weights(self.net, expected)

    @torch.no_grad()
    def evaluated(self, module: nn.Module) -> None:
        x = torch.randn(16, WIDTH, generator=self.draws)
        with self.fabric.autocast():
            out = module(self.cast(x))
        self.check_output(out, x, module)

    def check_output(self, out: Tensor, x: Tensor, module: nn.Module) -> None:
        error = off(out.detach(), products(self.values(module), x))
        assert error < OUTPUT_ERROR * self.coarse, f"an output is off by {error}"

    def check_weights(self, module: nn.Module, expected: list[Tensor]) -> None:
        errors = [off(value, want) for value, want in zip(self.values(module), expected, strict=True)]
        assert max(errors) < WEIGHT_ERROR, f"weights are off by {errors}"


OPERATIONS = (
    World.forward, World.backward, World.step, World.step_by_hand, World.write_data, World.copy, World.replace_data,
    World.load, World.average, World.evaluate, World.train_other, World.train_other_in_a_thread,
)  # fmt: skip


def products(weights: list[Tensor], x: Tensor) -> Tensor:
    first, b1, second, b2 = weights
    return nn.functional.gelu(x @ first.t() + b1) @ second.t() + b2


def gradients(then: list[Tensor], now: list[Tensor], x: Tensor) -> list[Tensor]:
    """The gradients of a forward with the weights ``then``, whose backward multiplies by ``now``, as torch's does."""
    w, b, second, _ = (weight.clone().requires_grad_() for weight in then)
    hidden = nn.functional.gelu(x @ w.t() + b)
    out = (hidden @ second.t()).detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(out, x), out)
    first = torch.autograd.grad(hidden, (w, b), grad @ now[2])
    return [*first, grad.t() @ hidden.detach(), grad.sum(0)]


def every_order(operations: tuple[Callable[[World], None], ...], length: int) -> list[Callable[[World], None]]:
    """A sequence in which every order of ``length`` operations occurs once (de Bruijn, by Lyndon words)."""
    count, word, sequence = len(operations), [-1], []
    while word:
        word[-1] += 1
        if length % len(word) == 0:
            sequence += word
        known = len(word)
        while len(word) < length:
            word.append(word[len(word) - known])
        while word and word[-1] == count - 1:
            word.pop()
    return [operations[number] for number in (*sequence, *sequence[: length - 1])]


def check_orders(precision: str, length: int) -> int:
    """Run every order of ``length`` operations; return how many operations ran."""
    world, ran = World(precision), []
    for operation in every_order(OPERATIONS, length):
        ran.append(operation.__name__)
        try:
            operation(world)
        except Exception as error:
            error.add_note(f"{precision}, after {ran[-8:]}")
            raise
        if len(world.pending) > 3:
            del world.pending[0]
    return len(ran)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in sys.argv[2:] or names_on_cpu():
        print(f"{name}: {check_orders(name, int(sys.argv[1]))} operations", flush=True)
