"""Linears with coded weights: their three GEMMs, where the gradient goes, copies, moves, state, training."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.linear import ScaledLinear, revert, scale_linears
from lightning_lowprec.msamp.weight import best_values_of, values_of
from lightning_lowprec.private import torch as private
from tests.quality import expect_db, sqnr

LEVELS = ["O1", "O2", "O3"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
every_level = pytest.mark.parametrize("level", LEVELS)


def linear(level, bias=True, seed=0, **options):
    torch.manual_seed(seed)
    module = nn.Linear(32, 48, bias=bias)
    scale_linears(module, [""], level, **options)
    return module


def rounded(x, dtype):
    """x as a tensor of the format with the largest power-of-two scale that fits; float64."""
    limit = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    scale = 2.0 ** torch.floor(torch.log2(limit / x.double().abs().max()))
    return (x.double() * scale).float().to(dtype).double() / scale


@every_level
@pytest.mark.parametrize("rows", [16, 7])
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
def test_the_three_products_are_those_of_the_rounded_tensors(level, rows, emulate):
    module = linear(level, emulate=emulate)
    x = torch.randn(2, rows, 32, requires_grad=True)
    grad_output = torch.randn(2, rows, 48)
    output = module(x)
    output.backward(grad_output)
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


@every_level
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
@pytest.mark.parametrize("float32_gradients", [True, False])
def test_a_conv1d_computes_what_a_linear_does(level, emulate, float32_gradients):
    """Bit for bit; its weight, gradient and state dict are [in, out]."""
    torch.manual_seed(0)
    layers, found = (Conv1D(48, 32), nn.Linear(32, 48)), []
    with torch.no_grad():
        layers[1].weight.copy_(layers[0].weight.t())
        layers[1].bias.copy_(nn.init.normal_(layers[0].bias))
    x, grad = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 7, 48)
    for layer in layers:
        own = type(layer), set(vars(layer))
        scale_linears(layer, [""], level, emulate=emulate, float32_gradients=float32_gradients)
        x.grad = None
        output = layer(x)
        output.backward(grad)
        gradient = layer.weight.grad if float32_gradients else layer.weight.grad.decode()
        found.append([output, x.grad, layer.bias.grad, gradient, layer.state_dict()["weight"], layer.eval()(x)])
        copied = pickle.loads(pickle.dumps(layer))
        assert torch.equal(copied(x), layer(x))
        revert(layer)
        assert (type(layer), set(vars(layer))) == own
        found[-1].append(layer.weight.detach())
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs if ours.shape == theirs.shape else theirs.t())
    assert layers[0].weight.shape == found[0][3].shape == found[0][4].shape == (32, 48)


@every_level
def test_bf16_under_autocast(level):
    module, x = linear(level), torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x)
    assert output.dtype == torch.bfloat16
    expect_db(sqnr(module(x).detach(), output.detach().float()), 35)
    output.float().sum().backward()
    assert module.weight.grad is not None


@every_level
@pytest.mark.parametrize("shape", [(0, 32), (4, 0, 32)])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(level, shape):
    module, x = linear(level), torch.zeros(shape, requires_grad=True)
    output = module(x)
    assert output.shape == (*shape[:-1], 48)
    output.sum().backward()
    assert x.grad.shape == shape
    assert not module.weight.grad.codes.float().any()
    assert module.weight.grad.inv_scale.isfinite()
    assert not module.bias.grad.any()


def test_inference_mode():
    module, x = linear("O3"), torch.randn(4, 32)
    with torch.inference_mode():
        output = module(x)
    assert torch.equal(output, module(x))


def test_two_backwards_add_up_and_a_frozen_weight_gets_none():
    module, x = linear("O2"), torch.randn(16, 32)
    module(x).sum().backward()
    once = module.weight.grad.codes.float() * module.weight.grad.inv_scale
    module(x).sum().backward()
    twice = module.weight.grad.codes.float() * module.weight.grad.inv_scale
    assert torch.equal(twice, 2 * once)
    frozen = linear("O2")
    frozen.weight.requires_grad_(False)
    frozen(x).sum().backward()
    assert frozen.weight.grad is None


@every_level
def test_a_step_between_forward_and_backward_is_noticed(level):
    module, x = linear(level), torch.randn(16, 32, requires_grad=True)
    optimizer = ScaledAdamW(module.parameters(), level=level)
    module(x).sum().backward()
    loss = module(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_level
def test_the_parameter_stays_and_only_codes_are_saved_for_backward(level):
    torch.manual_seed(0)
    module = nn.Linear(32, 48)
    weight = module.weight
    scale_linears(module, [""], level)
    assert module.weight is weight
    assert type(module) is ScaledLinear
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(torch.randn(16, 32, requires_grad=True))
    assert max((t.itemsize for t in saved if t.dim() and t.shape != weight.shape), default=0) == 1


@every_level
def test_the_state_dict_is_plain_and_gives_the_same_outputs_back(level, tmp_path):
    module = linear(level)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert {key: value.dtype for key, value in state.items()} == {"weight": torch.float32, "bias": torch.float32}
    x = torch.randn(16, 32)
    for assign in (False, True):
        other = linear(level, seed=1)
        parameter = other.weight
        other.load_state_dict(state, assign=assign)
        assert other.weight is parameter
        assert torch.equal(other(x), module(x))
        assert torch.equal(values_of(other.weight), values_of(module.weight))
    plain = nn.Linear(32, 48)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, best_values_of(module.weight))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        other.load_state_dict({**state, "weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"bias": state["bias"]})


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_level
def test_an_average_of_one_model_is_that_model(level):
    module, x = linear(level), torch.randn(16, 32)
    copied = torch.optim.swa_utils.AveragedModel(module)
    optimizer = ScaledAdamW(module.parameters(), level=level)
    module(x).sum().backward()
    optimizer.step()
    copied.update_parameters(module)  # copies parameters
    assert torch.equal(copied(x), module(x))
    assert torch.equal(values_of(copied.module.weight), values_of(module.weight))


@pytest.mark.parametrize("change", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_became_a_plain_tensor_raises(change):
    module = linear("O2")
    change(module)
    with pytest.raises(TypeError, match=r"plain \(48, 32\) tensor.* before the conversion"):
        module(torch.randn(16, 32))


@every_level
@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_copies_have_scales_of_their_own(level, duplicate):
    module, x = linear(level), torch.randn(16, 32)
    clone = duplicate(module)
    assert torch.equal(clone(x), module(x))
    before = values_of(module.weight)
    clone(x).sum().backward()
    ScaledAdamW(clone.parameters(), lr=0.1, level=level).step()
    assert not torch.equal(values_of(clone.weight), before)
    assert torch.equal(values_of(module.weight), before)
    assert module.weight.grad is None


@every_level
def test_moves_keep_codes_and_take_scales_along(level):
    module = linear(level)
    dtype, x = module.weight.dtype, torch.randn(16, 32)
    expected = module(x)
    module.double().float()
    assert module.weight.dtype == dtype
    assert module.bias.dtype == torch.float32
    assert torch.equal(module(x), expected)
    module.to("meta")
    assert module.weight.is_meta
    assert module.weight.msamp_state.scale.is_meta
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_what_does_not_convert_is_named_and_nothing_changes():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "norm": nn.LayerNorm(32), "b": nn.Linear(32, 32)})
    model["c"] = nn.Linear(32, 32)
    model["c"].weight = model["b"].weight
    for fqn, error, message in [
        ("norm", TypeError, "'norm' is a LayerNorm; expected an nn.Linear"),
        ("b", ValueError, "the weight of 'b' is that of 'c' too"),
    ]:
        with pytest.raises(error, match=message):
            scale_linears(model, ["a", fqn], "O2")
        assert type(model["a"]) is nn.Linear


def final_loss(level):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
    )
    teacher = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    if level is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        scale_linears(model, ["0", "3"], level)
        optimizer = ScaledAdamW(model.parameters(), lr=3e-3, level=level)
    for _ in range(150):
        x = torch.randn(64, 16)
        loss = (model(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (model(x) - teacher(x)).square().mean().item()


@pytest.mark.slow_but("O2")
@every_level
def test_training_comes_near_float32(level):
    assert final_loss(level) < 1.3 * final_loss(None)


def test_a_private_name_of_torch_that_is_gone_is_reported_at_set_up(monkeypatch):
    monkeypatch.setitem(private.NAMES, private.MSAMP, ("torch._foreach_copy_", "torch._no_such_name"))
    assert private.moved() == ["torch._no_such_name, needed for MS-AMP"]
    with pytest.raises(
        ImportError, match=rf"torch {re.escape(torch.__version__)} .*torch\._no_such_name, needed for MS-AMP"
    ):
        linear("O2")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the layer's check of shapes
def test_what_does_not_run_through_codes_names_the_way_out():
    layer = linear("O2")
    x = torch.randn(16, layer.in_features, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*ScaledLinear.*keep="):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"`torch.func`.*ScaledLinear.*keep="):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(RuntimeError, match=r"`torch.export`.*ScaledLinear.*keep="):
        torch.export.export(layer, (x,))
    with pytest.raises(RuntimeError, match=r"`torch.jit.trace`.*ScaledLinear.*keep="):
        torch.jit.trace(layer, (x.detach(),))


def test_pruning_after_the_conversion_names_the_way_out():
    layer = linear("O2")
    torch.nn.utils.prune.l1_unstructured(layer, "weight", amount=0.5)
    for use in (lambda: layer(torch.randn(16, layer.in_features)), lambda: layer.to("cpu")):
        with pytest.raises(TypeError, match=r"Parametrize, prune or normalize weights before the conversion"):
            use()
