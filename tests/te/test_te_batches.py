"""Batches of any shape: rows that the GEMMs need, and nobody sees."""

from contextlib import nullcontext

import pytest
import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.nn import functional as F

from lightning_lowprec import FP8TE
from tests.te.reference import current_scaling, fabric_for


def grads(fabric, layer, x, grad):
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with fabric.autocast():
        output = layer(x)
    output.backward(grad.to(output.dtype))
    return output.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


def set_up(recipe):
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    fabric = fabric_for(FP8TE(recipe))
    fabric.setup(layer)
    return fabric, layer


@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (3, 5, 32), (2, 3, 11, 32), (32,), (0, 32)])
def test_ragged_batches_are_part_of_a_whole_one(reference_te, shape):
    fabric, layer = set_up(current_scaling())
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 64)
    tokens = x.numel() // 32
    whole = (tokens // 16 + 2) * 16
    x_whole, grad_whole = torch.zeros(whole, 32), torch.zeros(whole, 64)
    x_whole[:tokens], grad_whole[:tokens] = x.reshape(tokens, 32), grad.reshape(tokens, 64)
    found = grads(fabric, layer, x, grad)
    expected = grads(fabric, layer, x_whole, grad_whole)
    assert found[0].shape == grad.shape
    assert found[1].shape == x.shape
    assert torch.equal(found[0].reshape(tokens, 64), expected[0][:tokens])
    assert torch.equal(found[1].reshape(tokens, 32), expected[1][:tokens])
    for actual, wanted in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-3)  # sums of another length, rounded to bf16


@pytest.mark.parametrize(("recipe", "rows"), [("current", 16), ("delayed", 16), ("block", 16), ("nvfp4", 32)])
def test_only_a_batch_that_does_not_fit_is_copied(reference_te, monkeypatch, recipe, rows):
    fabric, layer = set_up(recipe)
    seen = []
    monkeypatch.setattr(te.Linear, "forward", lambda layer, x, *rest: seen.append(x) or x @ layer.weight.t())
    whole, ragged = torch.randn(rows, 32), torch.randn(rows + 7, 32)
    with fabric.autocast():
        outputs = layer(whole), layer(ragged)
    assert seen[0] is whole
    assert seen[1].shape == (2 * rows, 32)
    assert [len(output) for output in outputs] == [rows, rows + 7]
    for wrong in (torch.randn(rows, 31), torch.ones(rows, 32, dtype=torch.long)):
        with fabric.autocast(), pytest.raises(RuntimeError, match=r"shapes cannot be|same dtype|scalar type"):
            layer(wrong)
    assert len(seen) == 2, "the errors are torch's"
    with fabric.autocast(), torch.autocast("cpu", enabled=False):
        assert torch.equal(layer(whole), F.linear(whole, layer.weight, layer.bias)), "as the program declares"


# ---- layers that are called where no precision's context is


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, x):
        return self(x).sum()


def test_it_is_said(reference_te):
    model, x = Steps(), torch.randn(16, 32)
    wrapped = fabric_for(FP8TE(current_scaling())).setup(model)
    said = "outside of its precision's context, and so in high precision"
    wrapped.mark_forward_method("training_step")
    for call in (model, wrapped.training_step):
        with pytest.warns(UserWarning, match=said), pytest.raises(RuntimeError, match="CUDA"):  # its own GEMM
            call(x)
    with pytest.raises(RuntimeError, match="CUDA"):
        model.eval()(x)


@pytest.mark.parametrize("context", [False, True])
def test_an_input_that_is_not_on_cuda_is_refused(pretend_gpu, context):
    layer = nn.Linear(32, 32)
    fabric = fabric_for(FP8TE("current"))
    fabric.setup(layer)
    with fabric.autocast() if context else nullcontext(), pytest.raises(RuntimeError, match="computes on CUDA only"):
        layer(torch.randn(16, 32))
