"""`emulate="hopper"` and its siblings in every plugin that emulates: each product as the named GPU computes it."""

import logging
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightning_lowprec import MSAMP, FP8TorchAO
from lightning_lowprec.numerics import grouped_fp8, tensor_cores
from lightning_lowprec.numerics.fp8_matrices import TwoLayouts
from tests.conversion.test_head import build
from tests.numerics.tensor_core_judges import E4M3, E5M2, mma_sim
from tests.torchao.test_prototypes import needs_mxfp8
from tests.torchao.test_recipe_per_layer import FAST
from tests.toys import convert

pytest.importorskip("mmasim")
CPU = torch.device("cpu")
K, N, M = 288, 160, 144


def one_step(plugin):
    """Return input, weight, gradient of the output, and the three products of a Linear, all without batch."""
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=False)
    weight = layer.weight.detach().clone()
    model = L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_module(nn.Sequential(layer, nn.Identity()))
    input = torch.rand(M, K).bfloat16().requires_grad_()
    output = model(input)
    gradient = torch.randn(M, N).bfloat16()
    output.backward(gradient.to(output.dtype))  # Fabric's outputs are float32
    grad_weight = layer.weight.grad.float() if isinstance(layer.weight.grad, torch.Tensor) else None
    return input.detach(), weight, gradient, (output.detach().bfloat16(), input.grad, grad_weight)


def coded(values, dtype, rows=False, power_of_2=False):
    amax = values.abs().amax(1, keepdim=True) if rows else values.abs().amax()
    scale = (torch.finfo(dtype).max / amax.double()).float()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale
    return (values.float() * scale).to(dtype), scale


def multiplied(on, a, b, *, fast, dtype=torch.bfloat16):
    """Return a product of codes and their scales by MMA-Sim; scales are one each or one per row."""
    (codes_a, scale_a), (codes_b, scale_b) = a, b
    promoted = 128 if on in ("hopper", "ada") and not fast else 0
    sums = mma_sim(on, codes_a, codes_b, promoted=promoted)
    return (sums * (scale_a.reciprocal() * scale_b.reciprocal().t())).to(dtype)


@pytest.mark.slow_but("hopper")
@pytest.mark.parametrize("on", ["hopper", "ada", "blackwell"])
def test_one_scale_per_tensor(on):
    """torchao's flags: fast accumulation forward, promotion backward; gradients are e5m2."""
    input, weight, gradient, (output, grad_input, grad_weight) = one_step(FP8TorchAO(emulate=on))
    x, w, g = coded(input, E4M3), coded(weight, E4M3), coded(gradient, E5M2)
    turned = [(codes.t().contiguous(), scale) for codes, scale in (x, w, g)]
    assert_close(output, multiplied(on, x, w, fast=True), rtol=0, atol=0)
    assert_close(grad_input, multiplied(on, g, turned[1], fast=False), rtol=0, atol=0)
    assert_close(grad_weight, multiplied(on, turned[2], turned[0], fast=False).float(), rtol=0, atol=0)


def test_a_scale_per_row():
    input, weight, gradient, (output, grad_input, grad_weight) = one_step(FP8TorchAO("rowwise", emulate="hopper"))
    rows = partial(coded, dtype=E4M3, rows=True, power_of_2=True)
    assert_close(output, multiplied("hopper", rows(input), rows(weight), fast=True), rtol=0, atol=0)
    assert_close(grad_input, multiplied("hopper", rows(gradient), rows(weight.t()), fast=False), rtol=0, atol=0)
    expected = multiplied("hopper", rows(gradient.t()), rows(input.t()), fast=False).float()
    assert_close(grad_weight, expected, rtol=0, atol=0)


def test_a_power_of_two_per_tensor():
    input, weight, _, (output, *_) = one_step(MSAMP("O2", emulate="hopper"))
    x, w = (coded(values, E4M3, power_of_2=True) for values in (input, weight.half().float()))
    expected = multiplied("hopper", x, w, fast=False)
    assert not torch.equal(expected, multiplied("hopper", x, w, fast=True))
    assert_close(output, expected, rtol=0, atol=0)


@needs_mxfp8
def test_a_scale_per_block():
    """On Blackwell scales are a part of the sums; those of a weight are shared by 32 rows."""
    input, weight, _, (output, *_) = one_step(FP8TorchAO("mxfp8", emulate="blackwell"))
    operands = []
    for values, rows in ((input, 1), (weight, 32)):
        blocks = values.float().unflatten(1, (-1, 32))
        amax = blocks.abs().amax(-1).unflatten(0, (-1, rows)).amax(1).repeat_interleave(rows, 0)
        # rounded up, as in cuBLAS's documentation: the smallest power of two by which 448 is enough
        exponent = torch.ceil(torch.log2(amax / 448))
        operands += [(blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(1).to(E4M3)]
        operands += [(exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)]
    expected = mma_sim("blackwell", operands[0], operands[2], operands[1], operands[3])
    assert_close(output, expected.bfloat16(), rtol=0, atol=0)


def test_groups_of_rows():
    torch.manual_seed(0)
    rows, weights, ends = torch.rand(96, 256), torch.randn(3, 48, 256), torch.tensor([32, 32, 96], dtype=torch.int32)
    codes, of_rows = grouped_fp8.encode_rows(rows, True)
    of_experts, inverse = grouped_fp8.encode_weight(weights, True)
    inverses = of_rows, inverse
    output = grouped_fp8.product(codes, of_experts.mT, inverses, ends, torch.bfloat16, emulate="hopper")
    for expert, part in ((0, slice(32)), (2, slice(32, 96))):
        expected = mma_sim("hopper", codes[part], of_experts[expert]) * of_rows[part, None] * inverse[expert]
        assert_close(output[part], expected.bfloat16(), rtol=0, atol=0)

    left, of_left = grouped_fp8.encode_columns(rows, ends, True)
    right, of_right = grouped_fp8.encode_columns(torch.randn(96, 48), ends, True)
    inverses = of_left, of_right
    output = grouped_fp8.product(left, right.t(), inverses, ends, torch.bfloat16, emulate="hopper")
    expected = mma_sim("hopper", left[:, 32:], right[:, 32:]) * of_left[2, :, None] * of_right[2]
    assert_close(output[2], expected.bfloat16(), rtol=0, atol=0)
    assert not output[1].any()


@pytest.mark.parametrize("choice", FAST)
def test_an_fp8_head_adds_up_as_the_plugin_says(choice):
    model = build(hidden_size=160, vocab_size=144)
    head = nn.init.uniform_(model.lm_head.weight)
    convert(FP8TorchAO(emulate="hopper", fast_accum=choice, head="fp8"), model)
    hidden, target = torch.rand(144, 160, requires_grad=True), torch.arange(144)
    loss = model.loss_function(model.lm_head(hidden), None, 144, shift_labels=target)
    loss.backward()
    x, w = TwoLayouts.of(hidden.detach()), TwoLayouts.of(head.detach())
    forward, backward = (0 if fast else 128 for fast in FAST[choice][:2])
    logits = mma_sim("hopper", x.rows, w.rows, promoted=forward) * (x.inv_scale * w.inv_scale)
    assert_close(loss, nn.functional.cross_entropy(logits, target))
    codes = (2**14 * (logits.softmax(1) - nn.functional.one_hot(target, 144))).to(E5M2)
    for gradient, product, scale in (
        (hidden.grad, (codes, w.columns), w.inv_scale), (head.grad, (codes.t(), x.columns), x.inv_scale)
    ):  # fmt: skip
        expected = mma_sim("hopper", *product, promoted=backward) * scale / (2**14 * 144)
        assert (gradient - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_are_multiplied_in_the_order_of_the_kernels_and_a_compiler_keeps_the_bits(per_row):
    """With a scale per row CUTLASS multiplies by that of the column first, and then by that of the row."""
    torch.manual_seed(0)
    a, b = torch.randn(32, 64).to(E4M3), torch.randn(48, 64).to(E4M3)
    of_a, of_b = (torch.rand(32, 1), torch.rand(1, 48)) if per_row else (torch.rand(()), torch.rand(()))
    given = a, b.t(), of_a, of_b, torch.float32
    multiply = partial(tensor_cores.scaled_product, fast=True, on="hopper")
    sums = mma_sim("hopper", a, b)
    assert torch.equal(multiply(*given), sums * of_b * of_a if per_row else sums * (of_a * of_b))
    assert torch.equal(torch.compile(multiply, backend="aot_eager", fullgraph=True)(*given), multiply(*given))


def test_the_environment_names_a_gpu_where_the_plugin_says_nothing(monkeypatch, caplog):
    expected = one_step(FP8TorchAO(emulate="hopper"))[3][0]
    monkeypatch.setenv("LOWPREC_EMULATE", "hopper")
    with caplog.at_level(logging.INFO):
        assert torch.equal(one_step(FP8TorchAO())[3][0], expected)
    assert "FP8 is emulated on cpu: codes, scales and sums as on NVIDIA Hopper; slow" in caplog.text
    assert FP8TorchAO().emulates(torch.device("cuda")) == "hopper"
    assert FP8TorchAO(emulate=False).emulates(CPU) is False
    assert FP8TorchAO(emulate=True).emulates(CPU) is True
    assert MSAMP().emulates(CPU) == FP8TorchAO("mxfp8").emulates(CPU) == "hopper"
    monkeypatch.setenv("LOWPREC_EMULATE", "hoper")
    with pytest.raises(ValueError, match=r"`LOWPREC_EMULATE='hoper'` is not valid; expected one of: hopper, ada, bl"):
        FP8TorchAO()


def test_a_gpu_without_the_arithmetic_is_refused():
    for how, others in (({"experts": "fp8"}, "'hopper', 'blackwell', True"), ({"recipe": "block"}, "'hopper', True")):
        message = rf"`emulate='ada'` is not valid: NVIDIA 8.9 .*expected one of: {others}"
        with pytest.raises((ValueError, RuntimeError), match=message):
            one_step(FP8TorchAO(emulate="ada", **how))
