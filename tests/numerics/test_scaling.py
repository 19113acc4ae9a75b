"""Formats by all their codes; scales and casts by exact arithmetic on fractions."""

import itertools
import math
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch

from lightning_lowprec.numerics import formats, weight_rounding
from lightning_lowprec.numerics.formats import E4M3, E5M2, FP16
from lightning_lowprec.numerics.one_pass import _copied
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.mxfp8 import MXFP8
from tests.quality import sqnr

ALL = [E4M3, E5M2, FP16]
NAMES = ["e4m3", "e5m2", "fp16"]
every_format = pytest.mark.parametrize("format", ALL, ids=NAMES)
INF, NAN = math.inf, math.nan


def codes(format):
    """Every value of a format, by its bit patterns; decoded by torch's widening, which is exact."""
    if format.dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(format.dtype).float()
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(format.dtype).float()


@every_format
def test_the_limits_are_those_of_the_codes(format):
    values = codes(format)
    finite = values[values.isfinite()]
    assert format.max == finite.max() == torch.finfo(format.dtype).max
    assert format.has_inf == bool(values.isinf().any())


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=NAMES[:2])
def test_many_codes_are_decoded_to_the_bits_that_torch_widens_few_to(format):
    many = torch.arange(256).to(torch.uint8).view(format.dtype).repeat(64).view(128, 128)
    for layout in (many, many.t()):
        decoded, expected = formats.decode(layout), layout.float()
        assert decoded.stride() == expected.stride()
        assert torch.equal(decoded.isnan(), expected.isnan())
        decoded, expected = (values.nan_to_num(nan=0.5).view(torch.int32) for values in (decoded, expected))
        assert torch.equal(decoded, expected)


@every_format
def test_the_scale_is_the_largest_power_of_two_that_fits(format):
    edges = [format.max * 2.0**k for k in (-140, -100, -9, -1, 0, 1, 9, 100)]
    edges = [x for x in edges if 2.0**-149 <= x < 2.0**127]
    base = torch.tensor([*edges, 1.0, 1 / 3, 0.1, 2.0**-149, 2.0**-126, 3.4e38])
    amax = torch.cat([base, torch.nextafter(base, torch.tensor(INF)), torch.nextafter(base, torch.zeros(()))])
    amax = amax[amax.isfinite() & (amax > 0)]
    for a, scale in zip(amax.tolist(), formats.power_of_two_scale(amax, format).tolist(), strict=True):
        ratio = Fraction(format.max) / Fraction(a)
        if Fraction(2) ** -126 <= ratio < Fraction(2) ** 126:
            assert Fraction(scale) <= ratio < 2 * Fraction(scale), a
        else:
            assert scale == (2.0**126 if ratio > 1 else 2.0**-126)
        assert math.frexp(scale)[0] == 0.5
        assert torch.tensor(scale).reciprocal().isfinite()


def test_an_amax_of_zero_or_not_finite_keeps_the_old_scale():
    amax = torch.tensor([0.0, INF, NAN, 1.0])
    old = torch.tensor([2.0, 4.0, 8.0, 16.0])
    assert formats.power_of_two_scale(amax, E4M3, old).tolist() == [2.0, 4.0, 8.0, 256.0]
    assert formats.power_of_two_scale(amax, E4M3).tolist() == [1.0, 1.0, 1.0, 256.0]


@every_format
def test_the_cast_takes_the_nearest_code_and_the_even_one_of_two(format):
    grid = sorted({v for v in codes(format).tolist() if math.isfinite(v) and v >= 0})
    ends = grid if len(grid) < 600 else grid[:300] + grid[-300:]  # fp16 has 31744
    ties = [(a + b) / 2 for a, b in itertools.pairwise(grid) if a in ends and b in ends]
    x = torch.tensor([*ends, *ties])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.zeros(()))])
    x = x[(x >= 0) & (x <= format.max)]
    got = formats.saturating_cast(x, format).float()
    step = {value: i for i, value in enumerate(grid)}
    for value, rounded in zip(x.tolist(), got.tolist(), strict=True):
        above = bisect_left(grid, value)
        candidates = grid[max(above - 1, 0) : above + 1]
        nearest = min(candidates, key=lambda c: (abs(Fraction(c) - Fraction(value)), step[c] % 2))
        assert rounded == nearest, value
    assert torch.equal(formats.saturating_cast(-x, format).float(), -got)


@every_format
def test_the_cast_saturates_and_never_hides_what_is_not_finite(format):
    x = torch.tensor([format.max * 1.5, -format.max * 4, 3e38, INF, -INF, NAN, -0.0])
    top, low, huge, inf, minus_inf, nan, zero = formats.saturating_cast(x, format).float().tolist()
    assert (top, low, huge) == (format.max, -format.max, format.max)
    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1
    if format.has_inf:
        assert (inf, minus_inf) == (INF, -INF)
    else:
        assert math.isnan(inf)
        assert math.isnan(minus_inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax(dtype):
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=dtype)
    assert formats.amax(x).item() == 3.0
    assert formats.amax(x).dtype == torch.float32
    assert formats.amax(x[:0]).item() == 0.0
    assert formats.amax(torch.empty(0, dtype=dtype, device="meta")).is_meta
    assert formats.amax(torch.tensor([1.0, NAN], dtype=dtype)).isnan()
    assert formats.amax(torch.tensor([1.0, -INF], dtype=dtype)).item() == INF


def test_sqnr_is_that_of_the_definition():
    assert sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(10 * math.log10(100))
    assert sqnr(torch.ones(3), torch.ones(3)) == INF


def test_encoding_saturates():
    values = torch.tensor([447.0, 449.0, 1e9, INF, -INF, NAN])
    codes = formats.encode(values, torch.tensor(1.0), torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        codes, torch.tensor([448.0, 448.0, 448.0, 448.0, -448.0, NAN]), rtol=0, atol=0, equal_nan=True
    )


def test_every_block_of_a_weight_has_its_own_largest_value():
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    blocks = [[part.abs().max() for part in rows.split(128, 1)] for rows in weight.split(128)]
    assert weight_rounding.amax_grid(weight, "block").tolist() == blocks


def test_scales_are_nan_only_where_values_are_not_finite():
    amax = torch.tensor([0.0, 1e-30, 1.0, 448.0, 3e38, float("inf"), float("nan")])
    scale = formats.visible_scale(amax)
    assert torch.equal(scale[:5], formats.power_of_two_scale(amax[:5], E4M3))
    assert scale[0] == 1
    assert scale[5:].isnan().all()


@pytest.mark.skipif(prototype_refusal("mxfp8") is not None, reason=f"{prototype_refusal('mxfp8')}")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_tile_of_mxfp8_shows_inf(value):
    """In the products of forward and backward, where the tile takes part; other tiles stay finite."""
    weight, x = torch.randn(64, 64), torch.randn(32, 64)
    weight[40, 3] = value
    arithmetic = MXFP8(emulate=True)
    codes = arithmetic.operand(weight, "weight", torch.float32)
    tokens = arithmetic.operand(x, "input", torch.float32)
    output = arithmetic.multiply(tokens.rows(), codes.rows(), torch.float32, "output")
    assert output[:, :32].isfinite().all()
    assert not output[:, 32:].isfinite().any()


# ---- copies of functions, which compilers get


def scaled(rows, factor=2.0, *, shift=1.0):
    return rows * factor + shift


def test_a_copy_has_the_defaults_of_the_function_and_a_code_object_of_its_own():
    for function in (scaled, formats.encode):
        copy = _copied(function)
        assert copy.__code__ is not function.__code__
        assert copy.__name__ == function.__name__
        assert (copy.__defaults__, copy.__kwdefaults__) == (function.__defaults__, function.__kwdefaults__)
    rows = torch.ones(2, 3)
    assert torch.equal(_copied(scaled)(rows), torch.full((2, 3), 3.0))
    assert torch.equal(_copied(scaled)(rows, shift=0.0), torch.full((2, 3), 2.0))
