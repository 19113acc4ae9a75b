"""Code of the GPU lane for what is not here, against doubles: Transformer Engine, CUDA's events and allocator."""

import sys
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.gpu_lane import bytes_held, measure, models, setups
from benchmarks.gpu_lane.running import Job


class FakeTELinear(nn.Module):
    """The face of ``te.Linear``, which counts its calls."""

    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        self.in_features, self.out_features, self.calls = in_features, out_features, 0
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))

    def forward(self, x):
        self.calls += 1
        return nn.functional.linear(x, self.weight)


class FakeTENorm(nn.RMSNorm):
    """The face of ``te.RMSNorm``."""


@pytest.fixture
def fake_te(monkeypatch):
    entered = []
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.RMSNorm = FakeTELinear, FakeTENorm
    pytorch.autocast = lambda enabled, recipe: entered.append((enabled, recipe)) or nullcontext()
    recipes = types.ModuleType("transformer_engine.common.recipe")
    recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8BlockScaling = dict, list, tuple
    common, root = types.ModuleType("transformer_engine.common"), types.ModuleType("transformer_engine")
    root.common, root.pytorch, common.recipe = common, pytorch, recipes
    for module in (root, common, recipes, pytorch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return entered


def test_transformer_engine_by_hand(fake_te):
    job = Job(shape=models.TOY, device=torch.device("cpu"), compile=False)
    running = setups.transformer_engine(job, recipe="delayed")
    layers = [module for module in running.bare.modules() if isinstance(module, FakeTELinear)]
    assert len(layers) == 14, "all but the head"
    assert sum(isinstance(module, FakeTENorm) for module in running.bare.modules()) == 5, "every norm"
    reference = job.model()
    assert torch.equal(layers[0].weight, reference.layers[0].attention.q_proj.weight)
    held = {id(p) for group in running.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in running.bare.parameters()}
    running.step(models.batches(models.TOY, 1, torch.device("cpu"), count=3))
    assert all(layer.calls == 3 for layer in layers)
    assert fake_te == [(True, {})] * 3


class FakeEvent:
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now = FakeEvent.now + 2.5

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA's clock and allocator, so that the code for them has run at least once."""
    device = torch.device("cuda", 0)
    slept = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    allocated = iter(range(0, 1000, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: next(allocated))
    return device, slept


def test_cuda_times_come_from_events(fake_cuda):
    device, slept = fake_cuda
    assert measure.one(lambda: None, device) == 2.5
    assert slept == [int(measure.HIDE_LAUNCHES_MS * 1e-3 * measure.CLOCK_HZ)]
    measure.one(lambda: None, device, host=20.0)
    assert slept[1] == int(30e-3 * measure.CLOCK_HZ), "longer than the host launches"
    assert measure.sleep_ms(0.5) == 2.0
    assert measure.sleep_ms(500.0) == measure.LONGEST_SLEEP_MS
    seen = []
    times, wall = measure.steps(seen.append, 4, device)
    assert times == [2.5] * 4
    assert seen == [0, 1, 2, 3]
    assert wall > 0


def test_cuda_memory_comes_from_the_allocator(fake_cuda):
    device, _ = fake_cuda
    running = types.SimpleNamespace(forward=lambda batch: torch.ones(()), backward=lambda loss: None)
    assert bytes_held.by_allocator(running, (), device) == {"activations": 100, "gradients": 200}
