"""int8 and MXFP8 layers: bit for bit torchao's own modules, in place, with each product of three in bf16 or not."""

import re
from importlib.util import find_spec
from itertools import chain, combinations

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO, Int8TorchAO
from lightning_lowprec.tools.cli import main
from tests.quality import expect_db, sqnr

CPU = torch.device("cpu")
WITHOUT_TRANSFORMERS = find_spec("transformers") is None  # the oldest versions are tested without
needs_transformers = pytest.mark.skipif(WITHOUT_TRANSFORMERS, reason="transformers is not installed")
IN, OUT = 128, 192
GEMMS = ("forward", "grad_input", "grad_weight")
NO_MXFP8 = FP8TorchAO("mxfp8").refusal(CPU)
needs_mxfp8 = pytest.mark.skipif(NO_MXFP8 is not None, reason=f"{NO_MXFP8}")
KINDS = ["int8", pytest.param("mxfp8_emulated", marks=needs_mxfp8)]
SUBSETS = [frozenset(gemms) for gemms in chain.from_iterable(combinations(GEMMS, n) for n in range(3))]


def plain(dtype=torch.float32, bias=True, conv1d=False):
    """A Linear, or the Conv1D that computes the same."""
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, bias=bias).to(dtype)
    if not conv1d:
        return linear
    from transformers.pytorch_utils import Conv1D

    conv = Conv1D(OUT, IN).to(dtype)
    conv.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    return conv


def converted(kind, layer, gemms=frozenset()):
    name = kind.partition("_")[0]
    recipes = {"0": {"recipe": name, **dict.fromkeys(gemms, "bf16")} if gemms else name}
    if name == "mxfp8":
        plugin = FP8TorchAO(recipes, emulate=True, weights="keep")
    else:
        plugin = Int8TorchAO(recipes, stochastic_rounding=kind == "int8_stochastic", weights="keep")
    plugin.bind_device(CPU)
    plugin.convert_module(nn.Sequential(layer))
    return layer


def results(layer, tokens=256, autocast=False):
    """Output, and the gradients of input, weight and bias, for Gaussian data in the dtype of the weight."""
    generator, dtype = torch.Generator().manual_seed(1), layer.weight.dtype
    x = torch.randn(tokens, IN, generator=generator).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(x)
    gradient = torch.randn(tokens, OUT, generator=generator).to(output.dtype)
    wanted = (x, *(p for p in (layer.weight, layer.bias) if p is not None))
    return dict(zip((*GEMMS, "bias"), (output, *torch.autograd.grad(output, wanted, gradient)), strict=False))


def torchaos(kind, layer):
    """torchao's own module with the parameters of a Linear."""
    sizes = {"bias": layer.bias is not None, "dtype": layer.weight.dtype}
    if kind == "int8":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig as Config
        from torchao.prototype.quantized_training.int8_mixed_precision import Int8MixedPrecisionTrainingLinear

        made = Int8MixedPrecisionTrainingLinear(IN, OUT, config=Config(module_swap=True), **sizes)
    else:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        made = MXFP8Linear(IN, OUT, kernel_preference=KernelPreference.EMULATED, **sizes)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_torchaos_module_bit_for_bit(kind, bias, dtype):
    """torchao's MXFP8 has a scale per row of our square tiles; uniform weights make them all one power of two."""
    theirs = torchaos(kind, plain(dtype, bias))
    ours = converted(kind, plain(dtype, bias))
    for tokens in (256, 13) if kind == "int8" else (256, 32):  # torchao's MXFP8 takes multiples of 32 tokens
        found, expected = results(ours, tokens), results(theirs, tokens)
        assert {name for name in found if not torch.equal(found[name], expected[name])} == set()
    assert repr(ours.products) in repr(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_size_are_rows_of_a_larger_one(kind):
    layer, x = converted(kind, plain()), torch.randn(3, 11, IN)
    together = layer(x)
    assert together.shape == (3, 11, OUT)
    assert torch.equal(layer(x[1, 2]), together[1, 2]), "a single vector"
    assert torch.equal(layer(x[:, :1]), together[:, :1])
    assert layer(x[:0]).shape == (0, 11, OUT)
    with torch.inference_mode():
        assert torch.equal(layer(x), together)
    for wrong in (torch.ones(2, IN + 1), torch.ones(2, IN, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as theirs:
            plain()(wrong)
        with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            layer(wrong)


@pytest.mark.parametrize("conv1d", [False, pytest.param(True, marks=needs_transformers)], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_gemm_is_that_of_bf16_mixed_or_of_the_arithmetic(kind, conv1d):
    """Bit for bit, in every subset, by a recipe, and for a Conv1D: that of a Linear, transposed."""
    high, low = results(plain(conv1d=conv1d), 45, True), results(converted(kind, plain(conv1d=conv1d)), 45, True)
    linear = results(converted(kind, plain()), 45, True)
    assert not any(torch.equal(high[gemm], low[gemm]) for gemm in GEMMS)
    if conv1d:
        assert torch.equal(low["forward"], linear["forward"])
        assert torch.equal(low["grad_input"], linear["grad_input"])
        torch.testing.assert_close(low["grad_weight"], linear["grad_weight"].t(), rtol=2**-7, atol=0)  # order of scales
        assert low["grad_weight"].is_contiguous()
    for gemms in SUBSETS:
        found = results(converted(kind, plain(conv1d=conv1d), gemms), 45, True)
        for name in GEMMS:
            assert torch.equal(found[name], (high if name in gemms else low)[name]), (gemms, name)
        assert torch.equal(found["bias"], high["bias"])


def test_stochastic_rounding_has_no_bias_and_touches_gradients_only():
    torch.manual_seed(0)
    layer, nearest = converted("int8_stochastic", plain(bias=False)), converted("int8", plain(bias=False))
    layer.weight.data = nearest.weight.data = torch.eye(OUT, IN)  # codes are exact; grad_input is the rounded gradient
    gradient = torch.full((32, OUT), 0.3 / 127)
    gradient[:, 0] = 1.0  # a step is 1 / 127

    def grad_input(layer):
        x = torch.ones(32, IN, requires_grad=True)
        output = layer(x)
        assert torch.equal(output, nearest(x)), "the forward is not random"
        return torch.autograd.grad(output, x, gradient)[0][:, 1:IN] * 127

    assert grad_input(nearest).abs().max() == 0.0, "0.3 of a step is lost"
    drawn = torch.stack([grad_input(layer) for _ in range(20)])
    assert set(drawn.round(decimals=4).unique().tolist()) == {0.0, 1.0}
    deviation = (0.3 * 0.7 / drawn.numel()) ** 0.5
    assert drawn.mean().item() == pytest.approx(0.3, abs=4 * deviation)
    layer.weight.data = nearest.weight.data = torch.randn(OUT, IN)
    x = torch.randn(32, IN)
    assert torch.equal(layer(x), nearest(x)), "inputs and weights whose codes are not exact are not random either"


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_that_is_differentiated_runs_in_high_precision(kind):
    low, high = converted(kind, plain(torch.float32)), plain(torch.float32)
    second = []
    for layer in (low, high):
        x = torch.randn(32, IN, generator=torch.Generator().manual_seed(1), requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
    expect_db(sqnr(second[1], second[0]), 20)
    with pytest.raises(RuntimeError, match="CodedLinear"):
        torch.func.vmap(low)(torch.ones(2, IN))


@needs_transformers
def test_experts_stay_in_bf16_with_the_reason(capsys):
    assert main(["plan", "mixtral", "--precision=int8-mixed"]) == 0
    shown = capsys.readouterr().out
    assert "kept: no Linear (stacked experts), bf16" in shown
    assert re.search(r"self_attn.q_proj .* int8\n", shown)
    assert "in int8 (" in shown
    assert re.search(r"with AdamW +weights +gradients +moments \+ masters +together", shown)
    assert "gains per layer: not known for int8" in shown
    assert "FP8" not in shown.split("with AdamW")[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8TorchAO("mxfp8"), r"`recipe='mxfp8'` is not valid; expected"),
        (lambda: FP8TorchAO("int8"), r"`recipe='int8'` is not valid; expected"),
        (lambda: Int8TorchAO({"*": "tensorwise"}), r"expected one of: 'int8', 'bf16', 'fp32', or a mapping"),
        (lambda: Int8TorchAO(stochastic_rounding="no"), "`stochastic_rounding='no'` is not valid"),
    ],
)
def test_options_that_are_not_valid_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def on_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU X")


@needs_mxfp8
def test_devices_without_mxfp8_are_refused_unless_the_user_asks_for_emulation(monkeypatch):
    assert FP8TorchAO("mxfp8", emulate=False).refusal(CPU) == "cpu has no MXFP8 kernels. Leave `emulate=False` out"
    on_gpu(monkeypatch, (9, 0))
    cuda = torch.device("cuda", 0)
    refusal = FP8TorchAO("mxfp8").refusal(cuda)
    assert refusal.startswith("GPU X (compute capability 9.0) has no products with a scale per 32 values")
    assert refusal.endswith("Use 'fp8-hybrid', or `plugins=FP8TorchAO(..., emulate=True)` to emulate FP8, slowly")
    assert FP8TorchAO("mxfp8", emulate=True).refusal(cuda) is None
    assert Int8TorchAO().refusal(cuda) is None
    on_gpu(monkeypatch, (10, 0))
    assert FP8TorchAO("mxfp8").refusal(cuda) is None


def test_an_older_torchao_is_named_with_the_version_that_has_the_prototype(monkeypatch):
    if NO_MXFP8 is None:
        lacking = dict.fromkeys(("int8", "mxfp8"), ("9.9", ("torchao.float8.TheNewName",)))
        monkeypatch.setattr("lightning_lowprec.private.torchao._PROTOTYPES", lacking)
        kinds, name, version = ("int8", "mxfp8"), "torchao.float8.TheNewName", "9.9"
    else:  # the oldest torchao that is supported
        kinds, name, version = ("mxfp8",), "torchao.prototype.mx_formats.", "0.18"
    for kind in kinds:
        made = {"int8": Int8TorchAO, "mxfp8": FP8TorchAO}[kind](kind)
        made.bind_device(CPU)
        message = rf"cannot run: torchao [\d.+a-z]+ does not have '{name}.*; torchao {version} has: `pip install"
        with pytest.raises(RuntimeError, match=message):
            made.convert_module(plain())
