"""Weights that are quantised once per optimizer step: how often that is, and that no gradient changes."""

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TE
from tests.te import reference
from tests.te.subjects import fabric_for

MICRO_BATCHES, WINDOWS = 4, 3


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


class Run:
    """Gradients and quantisations of some steps; ``passes`` is how a batch becomes gradients."""

    def __init__(self, passes, cached, **options):
        self.model, self.notes, self.grads, self.counts = layers(), [], [], []
        plugin = FP8TE(reference.counting_current_scaling(self.notes), fp8_params=cached, **options)
        self.fabric = fabric_for(plugin)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wrapped, optimizer = self.fabric.setup(self.model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(WINDOWS):
            before = len(self.notes)
            batches = [torch.randn(16, 32, generator=generator) for _ in range(MICRO_BATCHES)]
            passes(self, batches)
            self.counts.append((len(self.notes) - before) // 2)
            self.grads.append([p.grad.clone() for p in self.model.parameters()])
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, output):
        self.fabric.backward(output.square().mean())


def one_by_one(run, batches):
    for x in batches:
        run.backward(run.wrapped(x))


def with_evaluation_between(run, batches):
    for x in batches:
        with torch.no_grad():
            run.wrapped(x)
        run.backward(run.wrapped(x))


ALL = [one_by_one, with_evaluation_between]


@pytest.mark.parametrize("passes", ALL, ids=lambda passes: passes.__name__)
@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["float32", "masters"])
def test_gradients_are_those_without_the_cache(reference_te, passes, options):
    cached, plain = Run(passes, True, **options), Run(passes, False, **options)
    for found, expected in zip(cached.grads, plain.grads, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(plain.grads[0], plain.grads[1], strict=True))


def test_a_write_that_nobody_sees_is_what_the_next_forward_computes_with(reference_te):
    """Hand-written steps, target networks and averages write through `.data`: no version, no step of an optimizer."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    outputs = []
    for writes_later in (True, False):
        model = layers()
        wrapped = fabric_for(FP8TE(reference.current_scaling())).setup(model)
        for _ in range(3 * writes_later):
            wrapped(x).sum()
        model[0].weight.data.mul_(-2)
        outputs.append(wrapped(x).detach())
    assert torch.equal(*outputs)


def test_a_weight_is_quantised_once_per_step(reference_te):
    assert Run(one_by_one, False).counts == [MICRO_BATCHES] * WINDOWS
    assert Run(one_by_one, True).counts == [1] * WINDOWS


def test_an_input_that_needs_a_gradient_later(reference_te):
    """What was kept for inputs that need none has no transpose."""
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        layer, x = nn.Linear(32, 32), torch.randn(32, 32)
        fabric = fabric_for(FP8TE(reference.current_scaling(), fp8_params=cached))
        wrapped = fabric.setup(layer)
        for _ in range(3):
            fabric.backward(wrapped(x).square().mean())
        x.requires_grad_()
        for _ in range(2):
            fabric.backward(wrapped(x).square().mean())
        found.append((x.grad, layer.weight.grad))
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
