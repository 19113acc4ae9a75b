"""Gradients of gradients through FP8 layers, and what torch.func and torch.export say of them."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_lowprec import FP8TorchAO, Int8TorchAO


def layer(rows=16):
    torch.manual_seed(0)
    return nn.Linear(32, 64), torch.randn(rows, 32), torch.randn(rows, 64)


def penalty_gradients(model, x, v):
    """The gradient of |d (model(x) v) / dx|^2; and d (model(x) v) / d weight."""
    x, (weight, _) = x.clone().requires_grad_(), model.parameters()
    g, of_weight = torch.autograd.grad((model(x) * v).sum(), (x, weight), create_graph=True)
    (alone,) = torch.autograd.grad((model(x.detach()) * v).sum(), weight, create_graph=True)
    assert torch.equal(alone, of_weight), "whether the input has a gradient or not"
    g.pow(2).sum().backward()
    return weight.grad, of_weight


def in_fp8(model, **precision_or_plugin):
    return L.Fabric(accelerator="cpu", devices=1, **precision_or_plugin).setup_module(model)


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("precision", ["fp8-hybrid", "fp8-rowwise", "fp8-rowwise-gw-hp", "int8-mixed", "mxfp8"])
def test_the_gradient_of_a_penalty_on_one_layer_is_exact(precision, rows):
    # g = v @ W does not depend on the FP8 output, so d |g|^2 / dW = 2 v^T g. Small integers are exact in bf16 up to 256
    linear, x, v = layer(rows)
    with torch.no_grad():
        linear.weight.mul_(16).round_()
    v = v.round().clamp(-1, 1)
    expected = 2 * v.t() @ (v @ linear.weight.detach())
    of_penalty, of_weight = penalty_gradients(in_fp8(linear, precision=precision), x, v)
    torch.testing.assert_close(of_penalty, expected, rtol=2**-8, atol=0)
    torch.testing.assert_close(of_weight, v.t() @ x.bfloat16().float(), rtol=2**-8, atol=1e-6)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize(
    ("name", "class_name", "plugin"),
    [("fp8-hybrid", "FP8Linear", FP8TorchAO), ("int8-mixed", "CodedLinear", Int8TorchAO)],
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_says_the_way_out_which_works(transform, name, class_name, plugin):
    linear, x, _ = layer()
    with pytest.raises(RuntimeError, match=f"`torch.func` .* does not run through {class_name}.*`fp8_eval=False`"):
        TRANSFORMS[transform](in_fp8(linear, precision=name).module, x)
    plain, _, _ = layer()
    model = in_fp8(linear, plugins=plugin(fp8_eval=False)).module.eval()
    torch.testing.assert_close(TRANSFORMS[transform](model, x), TRANSFORMS[transform](plain, x))


@pytest.mark.parametrize("precision", ["fp8-hybrid", "int8-mixed", "fp8-block", "msamp-o2"])
def test_forward_mode_says_the_way_out(precision):
    linear, x, _ = layer()
    model = in_fp8(linear, precision=precision)
    for where in (model, model.module):  # in the plugin's forward, and outside of it
        with pytest.raises(RuntimeError, match=r"forward mode .*keep="), forward_ad.dual_level():
            where(forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the layer's check of shapes
def test_export_says_the_way_out_which_works():
    linear, x, _ = layer()
    with pytest.raises(RuntimeError, match=r"`torch.export` .* cannot export FP8Linear.*fp8_eval=False"):
        torch.export.export(in_fp8(linear, precision="fp8-hybrid").module, (x,))
    with pytest.raises(RuntimeError, match=r"`torch.jit.trace` cannot trace FP8Linear.*fp8_eval=False"):
        torch.jit.trace(linear.eval(), x)
    plain, _, _ = layer()
    model = in_fp8(linear, plugins=FP8TorchAO(fp8_eval=False)).module.eval()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), plain(x))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), plain(x))
