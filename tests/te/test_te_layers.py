"""What becomes of torch's layers: the same objects, the same names, the same numbers."""

import copy
import pickle
from importlib import import_module

import pytest
import torch
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec import FP8TE
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.conversion.in_place import unchanged
from lightning_lowprec.te import layer as linears
from lightning_lowprec.te import norms
from lightning_lowprec.te.delayed_scaling import restore_scales, saved_scales
from tests.conversion.test_plan import changed
from tests.te.reference import current_scaling, fabric_for, some_scales

OPTIONS = {"recipe": DelayedScaling(), "fp8_eval": True, "keep_weights": False}
OF_TRANSFORMERS = [
    getattr(import_module(f"transformers.models.{name}.modeling_{name}"), f"{name.title()}RMSNorm")
    for name in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
]


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm, *OF_TRANSFORMERS])
def test_norm_computes_the_same(pretend_gpu, onnx_forward, cls):
    torch.manual_seed(0)
    norm = cls(32, eps=1e-2)
    for p in norm.parameters():
        nn.init.normal_(p)
    own, attributes, parameters = type(norm), set(norm.__dict__), list(norm.parameters())
    x = torch.randn(3, 5, 32)
    expected = norm(x)
    assert norms.reason_to_keep(norm) is None
    model = nn.Sequential(norm)
    with unchanged(model):
        norms.convert_norms(model, {"0"})
    assert type(norm) is not own
    torch.testing.assert_close(onnx_forward(norm)(x), expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")  # our own formula
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert compiled(x.bfloat16()).dtype == norm(x[:0].bfloat16()).dtype == norm.weight.dtype
    assert all(a is b for a, b in zip(norm.parameters(), parameters, strict=True))
    norms.convert_norms(norm, ())
    assert type(norm) is own
    assert set(norm.__dict__) <= attributes | {"forwarded_at_least_once"}


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (changed(nn.LayerNorm(32), forward=torch.zeros_like), "its forward is replaced on the instance"),
        (nn.LayerNorm((4, 16)), "normalises 2 dimensions"),
        (nn.LayerNorm(20), "multiple of 16"),
        (nn.LayerNorm(32, bias=False), "has no bias"),
        (nn.LayerNorm(32, elementwise_affine=False), "has no weight"),
        (nn.RMSNorm(32), "eps=None"),
        (type("Own", (nn.LayerNorm,), {})(32), "a subclass of LayerNorm"),
        (type("OwnRMSNorm", (nn.RMSNorm,), {})(32), "OwnRMSNorm is no RMSNorm of torch, Llama or Gemma"),
        (nn.Linear(32, 32), "no norm"),
    ],
)
def test_norms_that_stay(norm, reason):
    assert reason in norms.reason_to_keep(norm)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32, bias=False))


def converted():
    net = model()
    linears.convert_linears(net, {"2", "3"}, **OPTIONS)
    norms.convert_norms(net, {"1"})
    return net


def test_conversion_keeps_what_it_must(pretend_gpu):
    net = model()
    net[2].weight.requires_grad_(False)
    net[3].eval().__class__ = Own = type("Own", (nn.Linear,), {"reset_parameters": id, "extra_repr": str})
    net[2].register_forward_hook(lambda *args: None)
    with unchanged(net):
        linears.convert_linears(net, {"2", "3"}, **OPTIONS)
        norms.convert_norms(net, {"1"})
    assert (type(net[3]).reset_parameters, type(net[3]).extra_repr) == (id, str), "the user's own"
    with unchanged(net):  # another plan: what is not in it goes back
        linears.convert_linears(net, {"2"}, **OPTIONS)
        norms.convert_norms(net, ())
    assert [type(m) for m in net[1:]] == [nn.LayerNorm, linears.TELinear, Own]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies(pretend_gpu, onnx_forward, how):
    net = converted()
    saved = {"2": some_scales(4), "of no layer": some_scales(4)}
    assert restore_scales([("2", net[2])], saved, DelayedScaling(amax_history_len=4)) == ["of no layer"]
    before = set(net[2].fp8_meta)
    net[2].fp8_meta |= {"recipe": DelayedScaling(amax_history_len=4), "num_gemms": 1}
    FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(net[2].fp8_meta)
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(net[2].fp8_meta)
    FP8GlobalStateManager.reset()
    net[3].weight = nn.Parameter(torch.randn(32, 48))
    other = how(net)
    assert type(other[2]) is linears.TELinear
    assert len(net[2].fp8_meta) > len(before) + 2  # places in buffers, which are of this process and layer
    assert other[2].fp8_meta.keys() == before
    assert not other[2].fp8_meta_tensors_initialized
    kept = saved_scales([("2", other[2])])["2"]
    assert all(torch.equal(kept[key], value) for key, value in some_scales(4).items())
    x = torch.randint(16, (4, 16))
    torch.testing.assert_close(onnx_forward(other)(x), onnx_forward(net)(x), rtol=0, atol=0)
    with torch.no_grad():
        other[2].weight.zero_()
    assert net[2].weight.abs().sum() > 0


def test_histories_of_any_length_go_into_the_tensors_of_a_running_layer(pretend_gpu):
    """Transformer Engine's global buffers point at them; of a shorter history nothing of the old one stays."""
    layer, recipe = converted()[2], DelayedScaling(amax_history_len=4)
    with torch.inference_mode():
        restore_scales([("", layer)], {"": some_scales(4)}, recipe)
    layer.fp8_meta["scaling_fwd"].amax_history.zero_()  # what a validation has restored is trained on
    layer.fp8_meta["scaling_fwd"].scale.mul_(2)
    before = layer.fp8_meta["scaling_fwd"].scale
    for length in (8, 4, 2):
        restore_scales([("", layer)], {"": some_scales(length)}, recipe)
        assert layer.fp8_meta["scaling_fwd"].scale is before
        found, common = saved_scales([("", layer)])[""], min(length, 4)
        assert torch.equal(found["forward.scale"], some_scales(length)["forward.scale"])
        assert found["forward.amax_history"].shape == (4, 3)
        assert torch.equal(found["forward.amax_history"][:common], some_scales(length)["forward.amax_history"][:common])
        assert found["forward.amax_history"][common:].eq(0).all()


@pytest.mark.parametrize(
    ("override", "dtype"), [(None, torch.float32), ("high_precision", torch.bfloat16), ("dequantized", torch.float32)]
)
def test_a_backward_in_high_precision_multiplies_in_one_dtype(pretend_gpu, override, dtype):
    """Transformer Engine's multiplies grad_output, in the autocast dtype, by the weight that it got."""
    layer = model()[2]
    linears.convert_linears(layer, {""}, **OPTIONS)
    layer.fp8, layer.activation_dtype = True, torch.bfloat16  # as after the first forward
    layer.recipe = Float8CurrentScaling(backward_override=override)
    weight, bias = layer._get_weight_and_bias_tensors()
    assert weight.dtype == dtype
    assert bias is layer.bias
    weight.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_recomputation_by_torch(pretend_gpu, onnx_forward):
    """Delayed scaling would use other scales than the first run; `test_te_backwards.py` runs another recipe."""
    layer = onnx_forward(converted()[2])
    layer.fp8, layer.recipe = True, DelayedScaling()  # as after a forward in FP8
    with torch.enable_grad():
        x = torch.randn(16, 32, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: (layer(x.detach()), grad)[1])  # what a checkpoint's unpack hook does
        with pytest.raises(RuntimeError, match="renewed its scales"):
            y.sum().backward()


def test_the_monitor_measures_the_output_and_leaves_the_scales_to_transformer_engine(reference_te):
    layer = torch.nn.Linear(32, 32)
    wrapped, monitor = fabric_for(FP8TE(current_scaling(), norms=False)).setup(layer), NumericsMonitor()
    monitor.step(wrapped, 0)
    x = torch.randn(64, 32)
    wrapped(x).sum().backward()
    readings = {reading.tensor: reading for reading in monitor.finish()}
    assert readings["input"].amax == pytest.approx(x.abs().max().item(), rel=0.01)
    assert all(reading.scale is None and reading.underflow is None for reading in readings.values())
    assert 20 < readings["input"].output_db < 40
