"""transformers' Conv1D in FP8: bit for bit a Linear with the transposed weight, and a Conv1D in everything else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.layer_runs import remove_hooks
from lightning_lowprec.torchao import linear as fp8
from lightning_lowprec.torchao.linear import CodedConv1D
from lightning_lowprec.torchao.plugin import CPU_SCALES_TENSORWISE
from tests.quality import FLOAT32, expect_db, sqnr

IN, OUT = 64, 96
ROWWISE = [{"recipe": "rowwise"}, {"recipe": "rowwise_with_gw_hp"}]
TENSORWISE = [
    {"weight_codes": codes, "fp8_format": gradients}
    for codes in ("per_forward", "per_gemm") for gradients in ("hybrid", "e4m3")
]  # fmt: skip
FP16 = [{"base": "fp16"}, {"base": "fp16", "weight_codes": "per_gemm"}]
OPTIONS = [*TENSORWISE, *ROWWISE, *FP16]


def pair(bias=True):
    """A Conv1D, and the Linear that computes the same."""
    torch.manual_seed(0)
    conv, linear = Conv1D(OUT, IN), nn.Linear(IN, OUT)
    nn.init.normal_(conv.bias)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return conv, linear


def set_up(layer, emulate=True, **options):
    plugin = FP8TorchAO(emulate=emulate, **options)
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(layer)
    return plugin


def step(layer, plugin, x, grad):
    x = x.clone().requires_grad_()
    with plugin.forward_context():
        output = layer(x)
    output.backward(grad.to(output.dtype))
    return output, x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_every_product_is_that_of_a_linear(options, emulate):
    if not emulate and "recipe" in options and CPU_SCALES_TENSORWISE:
        pytest.skip("this torch has no rowwise FP8 kernel for CPU (2.13 has)")
    conv, linear = pair()
    weight, bias = conv.weight, conv.bias
    plugins = [set_up(layer, emulate, **options) for layer in (conv, linear)]
    assert isinstance(conv, CodedConv1D)
    assert conv.weight is weight
    assert conv.bias is bias
    for number, shape in enumerate([(3, 21), (32,), (2, 2, 7)]):  # 63, 32 and 28 tokens
        generator = torch.Generator().manual_seed(number)
        x, grad = (torch.randn(*shape, size, generator=generator) for size in (IN, OUT))
        ours, theirs = (step(*both, x, grad) for both in zip((conv, linear), plugins, strict=True))
        for found, expected in zip(ours, (*theirs[:2], theirs[2].t(), theirs[3]), strict=True):
            assert torch.equal(found, expected)
        assert ours[2].is_contiguous(), "a transposed gradient would be copied"
        with torch.no_grad():  # the next forward computes with what is written
            conv.weight -= 0.1 * conv.weight.grad
            linear.weight -= 0.1 * linear.weight.grad


@pytest.mark.parametrize("codes", ["per_forward", "per_gemm"])
def test_a_gradient_of_a_gradient(codes):
    found = []
    for layer in pair():
        plugin = set_up(layer, weight_codes=codes)
        x = torch.randn(16, IN, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with plugin.forward_context():
            output = layer(x)
        (grad,) = torch.autograd.grad(output.float().square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append((x.grad, layer.weight.grad if layer.weight.shape[0] == OUT else layer.weight.grad.t()))
    for ours, theirs in zip(*found, strict=True):
        expect_db(sqnr(theirs, ours), FLOAT32)  # products in bf16


@pytest.mark.parametrize("options", [{}, {"weight_codes": "per_gemm"}, {"recipe": "rowwise"}], ids=str)
def test_compiled_is_eager(options):
    conv, _ = pair()
    plugin = set_up(conv, **options)
    x, grad = torch.randn(32, IN), torch.randn(32, OUT)
    eager = step(conv, plugin, x, grad)
    conv.zero_grad()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    for found, expected in zip(step(compiled, plugin, x, grad), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_everything_of_a_conv1d_stays():
    model = nn.Sequential(Conv1D(OUT, IN), nn.GELU(), Conv1D(IN, OUT), Conv1D(OUT, IN)).train()
    model[3].weight = model[0].weight
    model[2].eval().requires_grad_(False)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(layer)) for layer in model]
    with unchanged(model):
        set_up(model)
        remove_hooks(model)  # that of the module around, which notes its first run
    assert [isinstance(layer, CodedConv1D) for layer in model] == [True, False, True, True]
    assert all(isinstance(layer, Conv1D) and not isinstance(layer, nn.Linear) for layer in model[::2])  # PEFT asks
    assert model[0].weight.shape == (IN, OUT)
    assert repr(model[0]) == f"CodedConv1D(nf={OUT}, nx={IN})"
    model[0](torch.randn(4, IN))
    assert calls == ["forward"]
    del model[0]._forward_hooks[next(iter(model[0]._forward_hooks))]  # a lambda does not pickle
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(layer) for layer in again] == [type(layer) for layer in model]
        x = torch.randn(4, IN)
        assert torch.equal(again[0](x), model[0](x))
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name])
    fresh = nn.Sequential(Conv1D(OUT, IN), nn.GELU(), Conv1D(IN, OUT), Conv1D(OUT, IN))
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(fresh.state_dict())
    fp8.revert(model)
    assert [type(layer) for layer in model] == [Conv1D, nn.GELU, Conv1D, Conv1D]
    assert [set(vars(layer)) for layer in model] == attributes


@pytest.mark.parametrize("fp8_eval", [True, False])
def test_what_no_gemm_in_fp8_computes_is_the_conv1ds_own(fp8_eval):
    conv, _ = pair()
    own = copy.deepcopy(conv).eval()
    set_up(conv, fp8_eval=fp8_eval)
    conv.eval()
    x = torch.randn(7, IN)
    assert torch.equal(conv(x), own(x)) != fp8_eval
    assert conv(torch.empty(0, IN)).shape == (0, OUT)
    for wrong in (torch.randn(16, OUT), torch.ones(16, IN, dtype=torch.int64)):
        messages = []
        for module in (own, conv):
            with pytest.raises(RuntimeError) as error:
                module(wrong)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
