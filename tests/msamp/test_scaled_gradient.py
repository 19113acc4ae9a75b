"""The gradient of a coded weight is a gradient to everybody: clipping, scalers, zero_grad, norms; not to optimizers."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp import scale_linears

VALUES = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]])
"""Exact in e4m3 with any power-of-two scale."""
LINEAR = nn.Linear(16, 16, bias=False)


def linear():
    module = copy.deepcopy(LINEAR)
    scale_linears(module, [""], "O2")
    return module


def gradient_of(values):
    """Return the gradient of a weight that gets these values from its layer."""
    module = nn.Linear(*values.shape[::-1], bias=False)
    scale_linears(module, [""], "O2")
    module(torch.eye(len(values.T))).backward(values.T)
    return module.weight.grad


def with_gradient():
    module = linear()
    module(torch.eye(16)).sum().backward()
    return module


def test_it_is_a_float32_tensor_of_one_byte_per_element():
    gradient = gradient_of(VALUES)
    assert (gradient.dtype, gradient.shape, gradient.codes.dtype) == (torch.float32, (2, 3), torch.float8_e4m3fn)
    assert torch.equal(gradient.decode(), VALUES)
    assert gradient.norm() == VALUES.norm()
    assert torch.equal(gradient + 1.5, VALUES + 1.5)
    assert torch.equal(torch.zeros(2, 3).copy_(gradient), VALUES)
    assert "inv_scale" in repr(gradient)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda g: g.mul_(0.3),
        lambda g: g.mul_(torch.tensor(0.3)),
        lambda g: g.div_(1 / 0.3),
        lambda g: torch._foreach_mul_([g], 0.3),
        lambda g: torch._foreach_mul_([g, torch.ones(2)], torch.tensor(0.3)),
    ],
)
def test_multiplying_by_a_number_changes_only_the_scale(multiply):
    gradient = gradient_of(VALUES)
    codes = gradient.codes.clone()
    multiply(gradient)
    assert torch.equal(gradient.codes.float(), codes.float())
    assert torch.allclose(gradient.decode(), VALUES * 0.3, rtol=1e-6)


def test_gradients_of_different_scales_are_added():
    gradient = gradient_of(VALUES)
    gradient.add_(gradient_of(0.25 * VALUES))
    assert torch.equal(gradient.decode(), 1.25 * VALUES), "exact in e4m3"


def test_other_operations_in_place_encode_anew():
    gradient = gradient_of(VALUES)
    gradient.add_(VALUES)
    assert torch.equal(gradient.decode(), 2 * VALUES)
    gradient.clamp_(-4.0, 3.0)
    assert torch.equal(gradient.decode(), (2 * VALUES).clamp(-4.0, 3.0))
    gradient.mul_(torch.full((2, 3), 2.0))
    assert torch.equal(gradient.decode(), 2 * (2 * VALUES).clamp(-4.0, 3.0))
    gradient.zero_()
    assert torch.equal(gradient.decode(), torch.zeros(2, 3))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_the_scale_and_can_be_zeroed(bad):
    values = VALUES.clone()
    values[0, 0] = bad
    gradient = gradient_of(values)
    assert gradient.inv_scale.isnan()
    assert bool(gradient.isnan().all())
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2), gradient], found, torch.tensor(0.5))
    assert found == 1
    gradient.zero_()
    assert torch.equal(gradient.decode(), torch.zeros(2, 3))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_clips_it(foreach):
    module = with_gradient()
    exact = module.weight.grad.decode()
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=foreach) == exact.norm()
    assert torch.allclose(module.weight.grad.decode(), exact * 0.5 / exact.norm(), rtol=1e-5)
    torch.nn.utils.clip_grad_value_(module.parameters(), 2.0**-7, foreach=foreach)
    assert bool((module.weight.grad.decode() <= 2.0**-7).all())
    assert torch.nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2)), module.weight], 1e9) > 0


def test_a_weight_used_twice_gets_the_sum():
    module = linear()
    x = torch.eye(16)
    (module(x) + 2 * module(x)).sum().backward()
    assert torch.equal(module.weight.grad.decode(), torch.full((16, 16), 3.0))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
        (torch.optim.Adam, {"weight_decay": 0.1, "foreach": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adagrad, {"foreach": False}),
        (torch.optim.RMSprop, {"foreach": True}),
    ],
)
def test_an_optimizer_that_takes_codes_for_weights_raises(optimizer, options):
    module = with_gradient()
    with pytest.raises(TypeError, match=r"kept as codes with a scale.*AdamW.*msamp-o2"):
        optimizer(module.parameters(), **options).step()
