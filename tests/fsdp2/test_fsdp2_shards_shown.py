"""What user code sees of weights and gradients inside ``training_step`` in manual optimization; one process."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FSDP2Strategy
from lightning_lowprec.fsdp2.forward_hooks import SHARDS_IN_COMPUTATION
from tests.fsdp2.models import Block
from tests.fsdp2.test_fsdp2_review import fitted


class Steps(L.LightningModule):
    """Calls ``look(where)`` at each point of a manual step; ``compiled`` modules of the root are compiled in place."""

    def __init__(self, compiled=False, gain=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
        self.blocks = nn.ModuleList([Block(), Block()])
        if compiled:
            self.net.compile(backend="eager")
        if gain:
            self.gain = nn.Parameter(torch.full((64,), 2.0))
        self.automatic_optimization = False
        self.kinds = {}

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.net(x)

    def look(self, where):
        self.kinds[where] = {type(p).__name__ for p in self.parameters()}

    def training_step(self, batch):
        optimizer = self.optimizers()
        self.look("begin")
        x = batch[0] * self.gain if hasattr(self, "gain") else batch[0]
        loss = self(x).pow(2).mean()
        self.look("after forward")
        self.manual_backward(loss)
        self.look("after backward")
        self.learns = all(p.grad.full_tensor().any() for p in self.parameters())
        first = self.net[0].weight.grad.full_tensor().clone()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).pow(2).mean())  # the root is gathered again
        self.changed = bool((self.net[0].weight.grad.full_tensor() != first).any())
        before = self.net[0].weight.full_tensor().clone()
        optimizer.step()
        self.look("after step")
        self.moved = (self.net[0].weight.full_tensor() - before).norm().item()
        optimizer.zero_grad()
        out = self.net(batch[0])  # computed with the weights after the step
        w, b = self.net[0].weight, self.net[0].bias
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (w, b)]
        hidden = nn.functional.gelu(nn.functional.linear(batch[0], *whole))
        self.off = (nn.functional.linear(hidden, self.net[2].weight, self.net[2].bias) - out).abs().max().item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_are_shown_except_while_a_module_needs_weights(compiled):
    model = fitted(Steps(compiled), "fsdp2", devices=1)
    assert list(model.kinds) == ["begin", "after forward", "after backward", "after step"]
    assert all(kinds == {"DTensor"} for kinds in model.kinds.values())
    assert model.changed
    assert model.moved > 1e-4
    assert model.off < 1e-6


def test_a_lightning_module_computes_with_parameters_that_it_owns():
    model = fitted(Steps(gain=True), "fsdp2", devices=1)
    assert "Parameter" in model.kinds["begin"]
    assert model.kinds["after backward"] == model.kinds["after step"] == {"DTensor"}
    assert model.learns


class Own(L.LightningModule):
    """Computes with a parameter of its own before and after a call of itself."""

    def __init__(self, automatic):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(64, 64)
        self.gain = nn.Parameter(torch.full((64,), 2.0))
        self.automatic_optimization = automatic

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        self.zero_grad()
        output = self(batch[0] * self.gain) * self.gain
        self.dtype_inside = output.dtype
        loss = output.float().pow(2).mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.on_after_backward()

    def on_after_backward(self):
        self.gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in self.parameters()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("automatic", [False, True])
def test_parameters_used_around_a_call_of_the_module_get_their_gradients_in_the_same_step(automatic):
    ours, plain = (fitted(Own(automatic), strategy, devices=1, max_steps=1) for strategy in ("fsdp2", "auto"))
    for one, other in zip(ours.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert all(g.any() for g in plain.gradients)


def test_the_output_dtype_holds_inside_a_step_too():
    strategy = FSDP2Strategy(output_dtype=torch.float64)
    assert fitted(Own(True), strategy, "bf16-mixed", devices=1).dtype_inside == torch.float64


class Penalised(Steps):
    """A penalty on weights in the loss; its gradient is 2 w."""

    def training_step(self, batch):
        self.zero_grad()
        self.unshard()
        penalty = sum(p.pow(2).sum() for p in self.net.parameters())
        self.reshard()
        self.manual_backward(self(batch[0]).mean() * 0 + penalty)
        self.off = [(p.grad - 2 * p).full_tensor().abs().max().item() for p in self.net.parameters()]


def test_penalties_on_weights_by_the_way_out_that_the_error_names():
    assert max(fitted(Penalised(), "fsdp2", devices=1).off) < 1e-6


class Mixed(Steps):
    def training_step(self, batch):
        self.manual_backward(nn.functional.linear(batch[0], self.net[0].weight).mean())


def test_a_computation_with_a_shard_says_what_to_do():
    with pytest.raises(RuntimeError, match="mixed torch") as caught:
        fitted(Mixed(), "fsdp2", devices=1)
    assert caught.value.__notes__ == [SHARDS_IN_COMPUTATION]


class TwiceDifferentiated(Steps):
    def training_step(self, batch):
        x = batch[0].requires_grad_()
        torch.autograd.grad(self(x).float().sum(), x, create_graph=True)


def test_a_gradient_of_a_gradient_through_gathered_float8_weights_raises():
    with pytest.raises(RuntimeError, match=r"`create_graph=True`.*FP8Linear under FSDP2.*'ddp'"):
        fitted(TwiceDifferentiated(), "fsdp2", "fp8-hybrid", devices=1)


class Shared(Steps):
    """A compiled layer that two modules of the root share."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(64, 64)
        self.left, self.right = nn.Sequential(shared), nn.Sequential(shared)
        shared.compile(backend="eager")
        self.shared_call = shared._compiled_call_impl

    def forward(self, x):
        return super().forward(self.right(self.left(x)))


def test_a_compiled_layer_that_is_shared_gets_its_own_call_back():
    model = fitted(Shared(), "fsdp2", devices=1)
    assert model.left[0]._compiled_call_impl is model.shared_call
