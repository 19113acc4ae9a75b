"""A joined weight has its parts' gradients, and is not kept from forward to backward."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.te.fusion.joined_weight import join_weights, save_parts


class Multiply(torch.autograd.Function):
    """As Transformer Engine's functions do: the weight is saved, a cast of it too, and it is an attribute."""

    @staticmethod
    def forward(ctx, x, weight, nothing):
        ctx.save_for_backward(x, weight, weight.bfloat16(), nothing)
        ctx.weight = weight
        return x @ weight.T, None

    @staticmethod
    def backward(ctx, grad_output, _):
        x, weight, cast, nothing = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(cast, weight.bfloat16())
        return grad_output @ weight, grad_output.T @ x, None


def parts():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(n, 3)) for n in (4, 2, 2)]


def forward(x, weights, alive=None):
    joined = join_weights(weights)
    output = Multiply.apply(x, joined, None)[0]
    save_parts(output, joined, weights)
    if alive is not None:
        alive.append(weakref.ref(joined))
    return output


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_reach_every_part(checkpointed):
    weights, x = parts(), torch.randn(5, 3, requires_grad=True)
    output = checkpoint(forward, x, weights, use_reentrant=False) if checkpointed else forward(x, weights)
    output.pow(2).sum().backward()
    found = [x.grad, *(weight.grad for weight in weights)]
    x.grad, weights = None, parts()
    (x @ torch.cat(weights).T).pow(2).sum().backward()
    for a, b in zip(found, [x.grad, *(weight.grad for weight in weights)], strict=True):
        torch.testing.assert_close(a, b)


def test_the_joined_weight_is_gone_before_the_backward():
    weights, alive = parts(), []
    output = forward(torch.randn(5, 3), weights, alive)
    gc.collect()
    assert alive[0]() is None
    output.sum().backward()
    assert all(weight.grad is not None for weight in weights)


def test_weights_changed_before_the_backward_raise():
    weights = parts()
    output = forward(torch.randn(5, 3), weights)
    with torch.no_grad():
        weights[1].add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        output.sum().backward()


def test_one_part_is_itself():
    weight = parts()[0]
    assert join_weights([weight]) is weight
    x = torch.randn(5, 3)
    output = Multiply.apply(x, weight, None)[0]
    save_parts(output, weight, [weight])
    output.sum().backward()
    assert weight.grad is not None
