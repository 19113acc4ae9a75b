"""A joined weight has its parts' gradients, and is not kept from forward to backward."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params
from lightning_lowprec.te.fusion.joined_weight import (
    are_beside,
    join_weights,
    place_apart,
    place_beside,
    save_parts,
)


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


def parts(beside=False):
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(n, 3)) for n in (4, 2, 2)]
    assert place_beside(found) if beside else not are_beside(found)
    return found


def forward(x, weights, alive=None):
    joined = join_weights(weights)
    output = Multiply.apply(x, joined, None)[0]
    save_parts(output, joined, weights)
    if alive is not None:
        alive.append(weakref.ref(joined))
    return output


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_reach_every_part(checkpointed, beside):
    weights, x = parts(beside), torch.randn(5, 3, requires_grad=True)
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


@pytest.mark.parametrize("beside", [False, True])
def test_weights_changed_before_the_backward_raise(beside):
    weights = parts(beside)
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


def test_weights_beside_each_other_are_joined_without_a_copy():
    weights, separate = parts(beside=True), parts()
    joined = join_weights(weights)
    assert torch.equal(joined, torch.cat(separate))
    assert joined.data_ptr() == weights[0].data_ptr()
    with torch.no_grad():
        weights[1].fill_(7)  # as an optimizer does
    assert torch.equal(joined[4:6], torch.full((2, 3), 7.0))
    assert join_weights(separate).data_ptr() not in {weight.data_ptr() for weight in separate}


def test_a_frozen_part_gets_no_gradient():
    weights = parts(beside=True)
    weights[1].requires_grad_(False)
    join_weights(weights).sum().backward()
    assert [weight.grad is None for weight in weights] == [False, True, False]


def test_what_moves_a_weight_ends_it_and_placing_again_mends_it():
    model = nn.Module()
    model.parts = nn.ParameterList(parts())
    objects, values = list(model.parts), [weight.detach().clone() for weight in model.parts]
    assert place_beside(list(model.parts))
    for move in (lambda m: m.double().float(), lambda m: m.load_state_dict(m.state_dict(), assign=True)):
        moved = copy.deepcopy(model)
        assert not are_beside(list(moved.parts)), "a copy has memory of its own"
        assert place_beside(list(moved.parts))
        state = {key: value.clone() for key, value in moved.state_dict().items()}
        moved.load_state_dict(state)
        assert are_beside(list(moved.parts)), "values are copied into the memory that is there"
        move(moved)
        for ours, value in zip(moved.parts, values, strict=True):
            assert torch.equal(ours, value)
    model.double().float()
    assert not are_beside(list(model.parts))
    assert place_beside(list(model.parts))
    assert all(a is b for a, b in zip(model.parts, objects, strict=True))
    place_apart(list(model.parts))
    assert not are_beside(list(model.parts))
    assert all(weight.untyped_storage().nbytes() == weight.numel() * 4 for weight in model.parts)
    assert all(torch.equal(a, b) for a, b in zip(model.parts, values, strict=True))


def test_memory_that_something_else_looks_at_stays():
    looked_at = parts()
    view = looked_at[1].detach()
    assert not place_beside(looked_at)
    assert view.data_ptr() == looked_at[1].data_ptr()
    flat = torch.randn(8, 3)
    pieces = [nn.Parameter(flat[start:end]) for start, end in ((0, 2), (4, 8))]
    assert not place_beside(pieces), "views of a buffer with a gap"
    shared = [weight.share_memory_() for weight in parts()]
    assert not place_beside(shared)
    subclass = [nn.Parameter(part.detach().as_subclass(type("Coded", (torch.Tensor,), {}))) for part in parts()]
    assert not place_beside(subclass)
    mixed = [parts()[0], nn.Parameter(parts()[1].detach().double())]
    assert not place_beside(mixed)
    assert not place_beside([nn.Parameter(torch.empty(2, 3, device="meta")) for _ in range(2)])


def test_neighbours_in_two_storages_are_not_joined_by_a_view():
    buffer = torch.randn(8, 3)
    both = [nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:])]
    assert are_beside(both)
    transposed = [nn.Parameter(torch.randn(3, 4).T), nn.Parameter(torch.randn(3, 4).T)]
    assert not are_beside(transposed)
    assert not are_beside([both[1], both[0]])
    assert not are_beside([both[0], parts()[0]])


@pytest.mark.parametrize("form", ["fp32", "remainder", "stochastic"])
def test_masters_stay_exact_when_the_weights_move(form):
    """The optimizer sees other memory at its next step, with the same values."""
    found = []
    for moves in (False, True):
        weights = [nn.Parameter(weight.detach().bfloat16()) for weight in parts()]
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        add_masters(optimizer, MasterConfig(form=form))
        for step in range(4):
            for weight in weights:
                weight.grad = torch.full_like(weight, 0.01 * (step + 1))
            optimizer.step()
            if moves and step == 1:
                assert place_beside(weights)
        found.append([master.clone() for master in main_params(optimizer)] + [weight.detach() for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
