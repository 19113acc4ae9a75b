"""`fp8-block` against DeepSeek-V3's recipe, written here from the paper in integers, bit for bit."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.conversion.recipe_map import GEMMS
from lightning_lowprec.numerics.tensor_cores import accumulate
from lightning_lowprec.products.arithmetic import encode_tiles
from lightning_lowprec.products.block import _CODING
from tests.torchao.fp8_reference import E4M3, dequantise
from tests.torchao.fp8_reference import codes as codes_of
from tests.torchao.test_mixed_gemms import needs_mxfp8
from tests.toys import convert, on_gpu

CPU = torch.device("cpu")
CASES = {"whole": (128, 256, 384), "tails": (40, 272, 144), "small": (16, 48, 32)}


def nearest(values):
    """Round values to e4m3, ties to the even code; (...) float64 -> multiples of 2 ** -9, integers."""
    one = np.ones(())
    return (dequantise(codes_of(values, one, E4M3), one, E4M3) * 2**9).astype(np.int64)


def coded(values, rows, columns):
    """Integers, and reciprocals of scales by tile: [A, B] float32 -> [A, B], and a float32 per tile and element."""
    codes, inverse = np.zeros(values.shape, np.int64), np.zeros(values.shape, np.float32)
    for top, left in itertools.product(range(0, values.shape[0], rows), range(0, values.shape[1], columns)):
        part = (slice(top, top + rows), slice(left, left + columns))
        amax = max(float(np.abs(values[part]).max()), 1e-12)
        scale = np.float32(448.0 / amax)
        codes[part] = nearest((values[part] * scale).astype(np.float64))
        inverse[part] = np.float32(1) / scale
    return codes, inverse


def product(a, b):
    """[M, K], [N, K] with their reciprocals -> [M, N] float32: 128 products exactly, then scaled, then added."""
    (codes_a, inverse_a), (codes_b, inverse_b) = a, b
    total = np.zeros((len(codes_a), len(codes_b)), np.float32)
    for k in range(0, codes_a.shape[1], 128):
        sums = codes_a[:, k : k + 128] @ codes_b[:, k : k + 128].T
        scaled = (sums.astype(np.float64) * 2.0**-18).astype(np.float32)
        total = total + scaled * inverse_a[:, k, None] * inverse_b[None, :, k]
    return total


def by_paper(x, weight, gradient):
    """The three products of section 3.3: blocks of 1 x 128 along each sum, tiles of 128 x 128 of the weight."""
    x, weight, gradient = (t.detach().float().numpy() for t in (x, weight, gradient))
    codes, inverse = coded(weight, 128, 128)
    return {
        "forward": product(coded(x, 1, 128), (codes, inverse)),
        "grad_input": product(coded(gradient, 1, 128), (codes.T, inverse.T)),
        "grad_weight": product(coded(gradient.T.copy(), 1, 128), coded(x.T.copy(), 1, 128)),
    }


def layer_of(inputs, outputs, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to(dtype)
    return convert(FP8TorchAO("block", **options, weights="keep"), model)


def data(tokens, inputs, outputs, dtype):
    """Gaussian values, rows of zeros, rows that become subnormal codes, and a tile far below float32's normal range."""
    made = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(tokens, size, generator=made) for size in (inputs, outputs))
    x[1], gradient[2] = 0, 0
    x[3, 1:], gradient[4, 1:] = x[3, 1:] * 2.0**-12, gradient[4, 1:] * 2.0**-15
    x[5] *= 1e-14
    gradient[6] *= 1e-30
    return x.to(dtype), gradient.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_the_products_are_those_of_the_paper_bit_for_bit(sizes, dtype):
    tokens, inputs, outputs = sizes
    model = layer_of(inputs, outputs, dtype)
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].weight[2] *= 2.0**-14
    x, gradient = data(tokens, inputs, outputs, dtype)
    x.requires_grad_()
    output = model(x)
    found = output, *torch.autograd.grad(output, (x, model[0].weight), gradient)
    expected = by_paper(x, model[0].weight, gradient)
    for gemm, tensor in zip(GEMMS, found, strict=True):
        assert torch.equal(tensor, torch.from_numpy(expected[gemm]).to(dtype)), gemm
        assert tensor.abs().max() > 0


@pytest.mark.parametrize("inputs", [256, 272])
def test_a_named_gpu_adds_up_128_products_and_float32_the_rest(inputs):
    """On Hopper a sum begins anew every 128 products, so promotion is what `accumulate` does without fast sums."""
    ones = torch.full((16, inputs), 0.3)
    model = layer_of(inputs, 32, emulate="hopper")
    with torch.no_grad():
        model[0].weight.fill_(0.7)
    codes, scale, _ = encode_tiles(ones, (1, 128), _CODING)
    others, of_others, _ = encode_tiles(model[0].weight.detach(), (128, 128), _CODING)
    sums = accumulate(codes, others, "hopper", False)
    torch.testing.assert_close(model(ones), sums / scale[0, 0] / of_others[0, 0], rtol=1e-6, atol=0)
    assert not torch.equal(model(ones), layer_of(inputs, 32)(ones))


def test_a_nan_stays_in_its_block():
    values = torch.ones(256, 256)
    values[3, 5], values[200, 10] = torch.nan, torch.inf
    codes, *_ = encode_tiles(values, (128, 128), _CODING)
    is_nan = codes.float().isnan().reshape(2, 128, 2, 128).any(3).any(1)
    assert is_nan.tolist() == [[True, False], [True, False]]
    assert codes[128:, 128:].float().unique().tolist() == [448.0]


def test_devices_are_refused_with_the_remedy(monkeypatch):
    assert FP8TorchAO("block", emulate=False).refusal(CPU).endswith("Leave `emulate=False` out")
    assert FP8TorchAO("mxfp8", emulate=False).refusal(CPU) == "cpu has no MXFP8 kernels. Leave `emulate=False` out"
    cuda = on_gpu(monkeypatch, (8, 0))
    assert FP8TorchAO("block").refusal(cuda).endswith("`plugins=FP8TorchAO(..., emulate=True)` to emulate FP8, slowly")
    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert FP8TorchAO("block").refusal(cuda) is None
    how = FP8TorchAO("block").how(cuda)
    assert how == "FP8 GEMMs with a scale per block by cuBLASLt on GPU X (compute capability 9.0)"
    assert FP8TorchAO().how(cuda) == "FP8 kernels of GPU X (compute capability 9.0)"


def mx(values, rows, columns):
    """Integers, multiples of 2 ** -9, and the exponents of powers of two above amax / 448, for each element."""
    codes, exponents = np.zeros(values.shape, np.int64), np.zeros(values.shape, np.int64)
    for top, left in itertools.product(range(0, values.shape[0], rows), range(0, values.shape[1], columns)):
        part = (slice(top, top + rows), slice(left, left + columns))
        amax = Fraction(float(np.abs(values[part]).max()))
        exponent = 0 if amax else 127
        while amax > 448 * Fraction(2) ** exponent:
            exponent += 1
        while amax and amax <= 448 * Fraction(2) ** (exponent - 1):
            exponent -= 1
        codes[part] = nearest(values[part].astype(np.float64) * 2.0**-exponent)
        exponents[part] = exponent
    return torch.from_numpy(codes * 2.0**-9 * 2.0**exponents)


@needs_mxfp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp8_in_tiles_reads_one_rounded_weight_in_forward_and_backward(dtype):
    """Scales are rounded up, so the largest value of each tile stays within e4m3; products are those of the values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, bias=False)).to(dtype)
    with torch.no_grad():
        model[0].weight[:3] *= torch.tensor([[1.0], [2.0**-12], [0.0]])
        model[0].weight[32:] *= 2.0**-20
        model[0].weight[0, 0] = 449 / 2**6
    convert(FP8TorchAO("mxfp8", weights="keep"), model)
    x, gradient = data(64, 96, 64, dtype)
    x.requires_grad_()
    output = model(x)
    found = output, *torch.autograd.grad(output, (x, model[0].weight), gradient)
    weight = mx(model[0].weight.detach().float().numpy(), 32, 32).to(dtype)
    assert weight[0, 0] == 448 / 2**6
    rows, of_gradient = (mx(t.detach().float().numpy(), 1, 32).to(dtype) for t in (x, gradient))
    columns = [mx(t.detach().float().t().contiguous().numpy(), 1, 32).to(dtype) for t in (gradient, x)]
    expected = rows @ weight.t(), of_gradient @ weight.t().contiguous().t(), columns[0] @ columns[1].t()
    for gemm, one, other in zip(GEMMS, found, expected, strict=True):
        assert torch.equal(one, other), gemm
