"""Linears with coded weights: their three GEMMs, where the gradient goes, copies, moves, state, training."""

import pickle
import re
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import MSAMP, plain
from lightning_lowprec.msamp import scale_linears, values_of
from tests.msamp.msamp_runs import every_level, linear
from tests.quality import sqnr

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x, dtype):
    limit = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    scale = 2.0 ** torch.floor(torch.log2(limit / x.double().abs().max()))
    return (x.double() * scale).float().to(dtype).double() / scale


@every_level
@pytest.mark.parametrize("rows", [16, 7])
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
def test_the_three_products_are_those_of_the_rounded_tensors(level, rows, emulate):
    module, _ = linear(level, emulate=emulate)
    x = torch.randn(2, rows, 32, requires_grad=True)
    grad_output = torch.randn(2, rows, 48)
    output = module(x)
    with torch.profiler.profile() as profile:
        output.backward(grad_output)
    sliced = "aten::slice_backward" in {event.name for event in profile.events()}
    assert sliced == (rows == 7), "32 rows fit kernels: a slice would copy the gradient"
    weight = rounded(values_of(module.weight), E4M3)
    x8, g8 = rounded(x.detach(), E4M3), rounded(grad_output, E5M2)
    assert sqnr(x8 @ weight.T + module.bias.detach().double(), output.detach()) > 110  # float32 sums
    assert sqnr(g8 @ weight, x.grad) > 110
    exact = g8.flatten(0, 1).T @ x8.flatten(0, 1)
    gradient = module.weight.grad
    assert gradient.codes.dtype == E4M3
    assert sqnr(rounded(exact, E4M3), gradient.codes.double() * gradient.inv_scale) > 45  # but for ties
    assert torch.equal(gradient.decode(), gradient.codes.float() * gradient.inv_scale)
    assert torch.allclose(module.bias.grad, grad_output.sum((0, 1)))


K, N = 84, 10
"""Features that are no multiples of 16, as in MS-AMP's own example: zeros are appended inside of the products."""


def step(net, x, level, **options):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level, **options))
    module, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    x = x.clone().requires_grad_()
    output = module(x)[..., :N]
    fabric.backward(output.float().square().sum())
    assert (type(net.weight.grad) is torch.Tensor) == ("grad_accumulation_dtype" in options)
    optimizer.step()
    return output.detach(), x.grad[..., :K], values_of(net.weight)[:N, :K], net.bias[:N].detach()


@pytest.mark.parametrize("options", [{}, {"grad_accumulation_dtype": torch.float32}, {"emulate": "hopper"}], ids=str)
@pytest.mark.parametrize("tokens", [7, 0])
@every_level
def test_a_step_is_that_of_a_wider_layer_with_zeros(level, tokens, options):
    torch.manual_seed(0)
    narrow, wide = nn.Linear(K, N), nn.Linear(96, 16)
    with torch.no_grad():
        wide.weight.copy_(F.pad(narrow.weight, (0, 12, 0, 6)))
        wide.bias.copy_(F.pad(narrow.bias, (0, 6)))
    x = torch.randn(3, tokens, K, generator=torch.Generator().manual_seed(1))
    found, expected = step(narrow, x, level, **options), step(wide, F.pad(x, (0, 12)), level, **options)
    assert all(map(torch.equal, found, expected))


@every_level
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
@pytest.mark.parametrize("wide", [True, False])
def test_a_conv1d_computes_what_a_linear_does(level, emulate, wide):
    torch.manual_seed(0)
    layers, found = (Conv1D(48, 32), nn.Linear(32, 48)), []
    with torch.no_grad():
        layers[1].weight.copy_(layers[0].weight.t())
        layers[1].bias.copy_(nn.init.normal_(layers[0].bias))
    x, grad = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 7, 48)
    for layer in layers:
        own, shown = (type(layer), set(vars(layer))), repr(layer)
        scale_linears(layer, [""], level, emulate=emulate, fp8_eval=wide, float32_gradients=wide)
        assert repr(layer) == f"Scaled{shown}"
        x.grad = None
        output = layer(x)
        output.backward(grad)
        gradient = layer.weight.grad if wide else layer.weight.grad.decode()
        found.append([output, x.grad, layer.bias.grad, gradient, layer.state_dict()["weight"]])
        found[-1].append(torch.no_grad()(layer.eval())(x))
        assert bool(sqnr(found[-1][-1], layer(x)) < 100) == (not wide), "evaluates in FP8, or exactly"
        copied = pickle.loads(pickle.dumps(layer))
        assert torch.equal(copied(x), layer(x))
        plain(layer)
        assert (type(layer), set(vars(layer))) == own
        found[-1].append(layer.weight.detach())
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs if ours.shape == theirs.shape else theirs.t())
    assert layers[0].weight.shape == found[0][3].shape == found[0][4].shape == (32, 48)


PRUNED = partial(nn.utils.prune.l1_unstructured, name="weight", amount=0.5)


@pytest.mark.parametrize("change", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm, PRUNED])
def test_a_weight_that_became_a_plain_tensor_raises(change):
    module, _ = linear("O2")
    change(module)
    for use in (lambda: module(torch.randn(16, 32)), lambda: module.to("cpu"))[: 1 + (change is PRUNED)]:
        with pytest.raises(TypeError, match=r"plain \(48, 32\) tensor.* prune or normalize weights before the conv"):
            use()


@every_level
def test_moves_keep_codes_and_take_scales_along(level):
    module, _ = linear(level)
    dtype, x = module.weight.dtype, torch.randn(16, 32)
    expected = module(x)
    module.double().float()
    assert module.weight.dtype == dtype
    assert module.bias.dtype == torch.float32
    assert torch.equal(module(x), expected)
    module(x).sum().backward()
    with pytest.raises(ValueError, match="invalid type"):
        module.type("of nothing")
    module.to("cpu")
    assert torch.equal(module(x), expected)
    module.to("meta")
    assert module.weight.grad is None
    assert module.weight.is_meta
    assert module.weight.msamp_state.scale.is_meta
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_what_does_not_convert_is_named_and_nothing_changes():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "norm": nn.LayerNorm(32), "b": nn.Linear(32, 32)})
    model["c"] = nn.Embedding(32, 32)
    model["c"].weight = model["b"].weight
    for fqn, error, message in [
        ("norm", TypeError, "'norm' is a LayerNorm; expected an nn.Linear"),
        ("b", ValueError, r"the weight of 'b' is that of 'c' too.*keep=\['b'\]"),
    ]:
        with pytest.raises(error, match=message):
            scale_linears(model, ["a", fqn], "O2")
        assert type(model["a"]) is nn.Linear


def test_a_private_name_of_torch_that_is_gone_is_reported_at_set_up(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    with pytest.raises(
        ImportError, match=rf"torch {re.escape(torch.__version__)} .*torch\._foreach_copy_, needed for MS-AMP"
    ):
        linear("O2")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the layer's check of shapes
def test_what_does_not_run_through_codes_names_the_way_out():
    layer, _ = linear("O2")
    x = torch.randn(16, layer.in_features, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*ScaledLinear.*keep="):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"`torch.func`.*ScaledLinear.*keep="):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(RuntimeError, match=r"`torch.export`.*ScaledLinear.*or take another precision"):
        torch.export.export(layer, (x,))
    with pytest.raises(RuntimeError, match=r"`torch.jit.trace`.*ScaledLinear.*keep="):
        torch.jit.trace(layer, (x.detach(),))
    module = nn.Sequential(layer)
    ends = SimpleNamespace(close=lambda: plain(module)), SimpleNamespace(close=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), closing(ends[0]), closing(ends[1]):  # plain last, as a Trainer that failed
        torch.jit.trace(module, (x.detach(),))
    assert type(module[0].weight) is nn.Parameter


# ---- the gradient of a weight of codes is a gradient to everybody, but not to optimizers


VALUES = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]])
"""Exact in e4m3 with any power-of-two scale."""


def with_gradient(values):
    """Return a layer whose weight gets these values as its gradient."""
    module = nn.Linear(*values.shape[::-1], bias=False)
    scale_linears(module, [""], "O2")
    module(torch.eye(len(values.T))).backward(values.T)
    return module


def gradient_of(values):
    return with_gradient(values).weight.grad


def test_it_is_a_float32_tensor_of_one_byte_per_element():
    gradient = gradient_of(VALUES)
    assert (gradient.dtype, gradient.shape, gradient.codes.dtype) == (torch.float32, (2, 3), torch.float8_e4m3fn)
    assert torch.equal(gradient.decode(), VALUES)
    assert gradient.norm() == VALUES.norm()
    assert torch.equal(gradient + 1.5, VALUES + 1.5)
    assert torch.equal(torch.zeros(2, 3).copy_(gradient), VALUES)
    assert repr(gradient).startswith("ScaledGradient(shape=(2, 3), inv_scale=")


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


def test_other_operations_in_place_encode_anew():
    gradient = gradient_of(VALUES)
    assert torch.equal(gradient + gradient_of(4 * VALUES), 5 * VALUES)
    gradient.add_(gradient_of(0.25 * VALUES))
    assert torch.equal(gradient.decode(), 1.25 * VALUES), "gradients of different scales; exact in e4m3"
    gradient = gradient_of(VALUES)
    gradient.add_(VALUES)
    assert torch.equal(gradient.decode(), 2 * VALUES)
    gradient.clamp_(-4.0, 3.0)
    assert torch.equal(gradient.decode(), (2 * VALUES).clamp(-4.0, 3.0))
    gradient.mul_(torch.full((2, 3), 2.0))
    assert torch.equal(gradient.decode(), 2 * (2 * VALUES).clamp(-4.0, 3.0))
    gradients = [torch.ones(2, 3), gradient_of(VALUES), gradient]
    torch._foreach_zero_(gradients)
    assert not any(gradient.abs().sum() for gradient in gradients)


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
    weights = [with_gradient(torch.ones(16, 16)).weight for _ in range(2)]
    weights[1].grad.mul_(-3.0)
    exact = torch.stack([weight.grad.decode() for weight in weights])
    assert torch.nn.utils.clip_grad_norm_(weights, 0.5, foreach=foreach).item() == pytest.approx(exact.norm().item())
    assert torch.allclose(torch.stack([weight.grad + 0 for weight in weights]), exact * 0.5 / exact.norm(), rtol=1e-5)
    torch.nn.utils.clip_grad_value_(weights, 2.0**-7, foreach=foreach)
    assert [weight.grad.abs().max() for weight in weights] == [2.0**-7] * 2
    assert torch.nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2)), *weights], 1e9) > 0


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
    module = with_gradient(torch.ones(16, 16))
    with pytest.raises(TypeError, match=r"kept as codes with a scale.*AdamW.*msamp-o2"):
        optimizer(module.parameters(), **options).step()
