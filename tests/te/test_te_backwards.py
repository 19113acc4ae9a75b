"""Backward passes that are not the usual one: recomputed, partial, shared, inside evaluation."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lightning_lowprec import FP8TE, HalfMixed
from tests.precision.weights_left import same_bits
from tests.te.reference import Net, current_scaling, fabric_for


def plugin(**options):
    return FP8TE(current_scaling(), norms=False, **options)


class Checkpointed(Net):
    how = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
        return self.lm_head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fp8_params", [False, True])
def test_checkpointed_blocks(reference_te, reentrant, fp8_params):
    found = []
    for how in (None, reentrant):
        model = Checkpointed()
        model.how = how
        fabric = fabric_for(plugin(fp8_params=fp8_params))
        wrapped = fabric.setup(model)
        for seed in range(3):
            x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            fabric.backward(wrapped(x).square().mean())
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(found[0]) == len(list(model.parameters()))
    assert same_bits(*found)


def test_evaluation(reference_te):
    """In FP8 the numbers of training; with ``fp8_eval=False`` those of bf16. No mode changes either."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    model = Net()
    bf16 = fabric_for(HalfMixed("bf16")).setup(copy.deepcopy(model))(x)
    for fp8_eval in (True, False):
        wrapped = fabric_for(plugin(fp8_eval=fp8_eval)).setup(copy.deepcopy(model))
        with torch.inference_mode():
            first = wrapped.eval()(x)
        training = wrapped.train()(x)
        training.sum().backward()
        wrapped.eval()
        with torch.no_grad():
            second = wrapped(x)
        third = wrapped(x)
        assert not torch.equal(training.detach(), bf16)
        for output in (first, second, third.detach()):
            assert torch.equal(output, training.detach() if fp8_eval else bf16.detach())
        third.sum().backward()


def test_a_gradient_of_a_gradient_raises(reference_te):
    """Transformer Engine would return a gradient without the layer's part of it."""
    model = fabric_for(plugin()).setup_module(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    x = torch.randn(16, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*a layer of Transformer Engine.*keep=.*FP8TorchAO"):
        torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative in forward mode .*keep="), forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))
