"""When a quantised weight may be used again: the real answers to real steps, without kernels."""

import pytest
import torch
from torch import nn

from lightning_lowprec.te.layer import WeightCache


def ask(cache, weight, times=1):
    return [cache.is_first_microbatch(weight) for _ in range(times)]


@pytest.fixture
def layer():
    return nn.Linear(4, 4)


def step(optimizer, layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()


def test_without_accumulation_nothing_is_kept(layer):
    cache, optimizer = WeightCache(), torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(5):
        assert ask(cache, layer.weight) == [None]
        assert not cache.kept
        step(optimizer, layer)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_accumulation_is_learned_after_one_window(layer, optimizer_class, kind):
    cache, optimizer = WeightCache(), optimizer_class(layer.parameters(), lr=0.1, **{kind: True})
    assert ask(cache, layer.weight, 4) == [None, True, False, False]
    for _ in range(3):
        step(optimizer, layer)
        assert ask(cache, layer.weight, 4) == [True, False, False, False]
    step(optimizer, layer)
    assert ask(cache, layer.weight) == [True]  # accumulation has ended
    step(optimizer, layer)
    assert ask(cache, layer.weight) == [None]
    assert not cache.kept


class Unseen(torch.optim.Optimizer):
    """Writes like a kernel of an extension: no version is bumped."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.numpy()[:] += 1


def test_an_optimizer_that_bumps_no_version(layer):
    cache, optimizer = WeightCache(), Unseen(layer.parameters())
    assert ask(cache, layer.weight, 2) == [None, True]
    version = layer.weight._version
    optimizer.step()
    assert layer.weight._version == version
    assert ask(cache, layer.weight, 2) == [True, False]


def test_a_skipped_step_may_use_it_again(layer):
    """Nothing has changed, so what was kept is right."""
    cache = WeightCache()
    assert ask(cache, layer.weight, 2) == [None, True]
    layer.weight.grad = None
    assert ask(cache, layer.weight) == [False]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.load_state_dict(nn.Linear(4, 4).state_dict()),
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(4, 4))),
        lambda layer: setattr(layer.weight, "data", torch.zeros(4, 4)),
        lambda layer: nn.utils.vector_to_parameters(torch.zeros(20), layer.parameters()),
    ],
    ids=["load", "init", "another parameter", "other data", "a vector"],
)
def test_weights_written_from_outside(layer, change):
    cache = WeightCache()
    assert ask(cache, layer.weight, 3) == [None, True, False]
    change(layer)
    assert ask(cache, layer.weight, 2) == [True, False]
