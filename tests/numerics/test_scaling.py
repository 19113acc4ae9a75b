"""Formats by all their codes, of blocks too; scales by exact arithmetic on fractions; rows of groups; a warning."""

import functools
import math
from fractions import Fraction

import pytest
import torch

from lightning_lowprec.numerics import block_floats, formats, one_pass
from lightning_lowprec.numerics.formats import E4M3, E5M2, FP16
from lightning_lowprec.numerics.groups import group, spread
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.mxfp8 import MXFP8

ALL = [E4M3, E5M2, FP16]
NAMES = ["e4m3", "e5m2", "fp16"]
every_format = pytest.mark.parametrize("format", ALL, ids=NAMES)
INF, NAN = math.inf, math.nan


def codes(format):
    """Every value of a format, by its bit patterns; decoded by torch's widening, which is exact."""
    if format.dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(format.dtype).float()
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(format.dtype).float()


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


def test_scales_of_an_amax_of_zero_or_not_finite():
    amax = torch.tensor([0.0, INF, NAN, 1.0])
    old = torch.tensor([2.0, 4.0, 8.0, 16.0])
    assert formats.power_of_two_scale(amax, E4M3, old).tolist() == [2.0, 4.0, 8.0, 256.0]
    assert formats.power_of_two_scale(amax, E4M3).tolist() == [1.0, 1.0, 1.0, 256.0]
    amax = torch.tensor([0.0, 1e-30, 1.0, 448.0, 3e38, float("inf"), float("nan")])
    scale = formats.visible_scale(amax)
    assert torch.equal(scale[:5], formats.power_of_two_scale(amax[:5], E4M3))
    assert scale[0] == 1
    assert scale[5:].isnan().all()


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


def test_encoding_saturates():
    values = torch.tensor([447.0, 449.0, 1e9, INF, -INF, NAN])
    codes = formats.encode(values, torch.tensor(1.0), torch.float8_e4m3fn).float()
    assert codes[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    assert codes[5].isnan()


@pytest.mark.skipif(prototype_refusal("mxfp8") is not None, reason=f"{prototype_refusal('mxfp8')}")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_tile_of_mxfp8_shows_inf(value):
    weight, x = torch.randn(64, 64), torch.randn(32, 64)
    weight[40, 3] = value
    arithmetic = MXFP8(emulate=True)
    given = (arithmetic.operand(*of, torch.float32).rows() for of in ((x, "input"), (weight, "weight")))
    output = arithmetic.multiply(*given, torch.float32, "output")
    assert output[:, :32].isfinite().all()
    assert not output[:, 32:].isfinite().any()


BLOCK_FORMATS = pytest.mark.parametrize("format", [block_floats.E4M3, block_floats.E5M3], ids=["e4m3", "e5m3"])
SMALLEST = {block_floats.E4M3: 2.0**-17, block_floats.E5M3: 2.0**-33}
"""The smallest positive number of a block whose largest number is 1: 2**(1 - the largest field - bits of mantissa)."""
BLOCK = 32


def bits_of(count, seed=0):
    return torch.randint(0, 1 << 16, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def block(*first):
    return torch.tensor([*first, *[0.0] * (BLOCK - len(first))])


def around(values, format, seed=0):
    codes, exponents = block_floats.to_blocks(values, bits_of(values.numel(), seed), BLOCK, format)
    return block_floats.from_blocks(codes, exponents, BLOCK, format)


@BLOCK_FORMATS
def test_the_mean_over_all_random_bits_is_the_value(format):
    values = block(1.5, *(10.0 ** (-i / 4) for i in range(1, 31)))
    values = torch.where(values < SMALLEST[format], 0.0, values)  # second moments never round to zero
    rows = 1 << 16
    bits = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, BLOCK).reshape(-1)
    codes, exponents = block_floats.to_blocks(values.repeat(rows), bits, BLOCK, format)
    found = block_floats.from_blocks(codes, exponents, BLOCK, format).view(rows, BLOCK).double()
    steps = torch.tensor([max(2.0 ** (math.frexp(v)[1] - 1 - format.mantissa), SMALLEST[format]) for v in values])
    assert ((found.mean(0) - values).abs() <= steps * 2.0**-16).all(), "16 random bits say no more"
    assert ((found - values).abs() < steps).all(), "one of the two neighbours"
    assert found[:, 1:20].std(0).min() > 0, "really at random"


@BLOCK_FORMATS
def test_encoding_what_was_decoded_gives_the_same_numbers(format):
    """Every code but those of NaN, in a block with the largest code, at exponents from the least to the largest."""
    largest = format.top << format.mantissa | format.last
    codes = torch.arange(largest + 1)
    if format.signed:
        codes = torch.cat([codes, codes | 0x80])
    rows = torch.full((-(-len(codes) // (BLOCK - 1)), BLOCK), largest)
    flat = torch.nn.functional.pad(codes, (0, rows.shape[0] * (BLOCK - 1) - len(codes)))
    rows[:, 1:] = flat.view(rows.shape[0], BLOCK - 1)
    for exponent in (40, 127, 253):
        exponents = torch.full((rows.shape[0],), exponent, dtype=torch.uint8)
        values = block_floats.from_blocks(rows.view(-1).to(torch.uint8).view(format.dtype), exponents, BLOCK, format)
        assert torch.equal(around(values, format, seed=exponent), values)
        assert values.unique().numel() == (2 * largest + 1 if format.signed else largest + 1)


@BLOCK_FORMATS
def test_blocks_at_the_ends_of_their_range(format):
    small = SMALLEST[format]
    assert around(block(1.0, small), format)[1] == small
    below = torch.stack([around(block(1.0, small / 4), format, seed)[1] for seed in range(64)])
    if format.signed:
        assert set(below.tolist()) == {0.0, small}
        assert torch.equal(around(block(-1.0, -small), format), block(-1.0, -small))
    else:
        assert set(below.tolist()) == {small}, "Adam divides by its root"
    assert torch.equal(around(torch.zeros(BLOCK), format), torch.zeros(BLOCK))
    for lost in (math.nan, math.inf):
        values = torch.cat([block(1.0, lost), block(2.0)])
        codes, exponents = block_floats.to_blocks(values, bits_of(2 * BLOCK), BLOCK, format)
        assert exponents.tolist() == [block_floats.NAN_EXPONENT, 128], "2 is 2**(128 - 127)"
        found = block_floats.from_blocks(codes, exponents, BLOCK, format)
        assert found[:BLOCK].isnan().all()
        assert torch.equal(found[BLOCK:], block(2.0)), "other blocks do not notice"
    largest = torch.finfo(torch.float32).max
    found = around(block(largest), format)
    assert found.isnan().all() or found[0] <= largest
    assert around(block(2.0**126), format)[0] == 2.0**126
    assert around(block(2.0**-126), format)[0] == 2.0**-126
    assert torch.equal(around(block(2.0**-140), format), torch.zeros(BLOCK)), "subnormal numbers are zero"


def test_codes_are_torchs_float8_times_a_power_of_two():
    """The largest binade of a block is the largest binade of the float8: 2**8."""
    values = torch.rand(64, BLOCK, generator=torch.Generator().manual_seed(0)).pow(8).view(-1) * 1e-3
    codes, exponents = block_floats.to_blocks(values, bits_of(values.numel()), BLOCK, block_floats.E4M3)
    assert codes.dtype == block_floats.E4M3.dtype
    expected = codes.double().view(-1, BLOCK) * 2.0 ** (exponents.double()[:, None] - 127 - 8)
    assert torch.equal(block_floats.from_blocks(codes, exponents, BLOCK, block_floats.E4M3).double(), expected.view(-1))


def test_blocks_divide_rows():
    assert [*map(block_floats.block_size, (4096, 96, 384, 100, 16))] == [256, 32, 128, 0, 0]


def test_experts_without_tokens_have_rows_and_rows_without_meaning_reach_no_gradient():
    """Grouped kernels leave memory behind the last group as it was."""
    groups = group(torch.tensor([[39], [39]]), 40, 16)
    assert groups.ends.tolist() == [16 * (expert + 1) for expert in range(40)]
    assert groups.row.tolist() == [39 * 16, 39 * 16 + 1]
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(10)[:2] for _ in range(37)])  # half of the experts are of other ranks
    groups = group(index, 5, 16, some_absent=True)
    tokens = torch.randn(len(index), 4, requires_grad=True)
    rows = spread(tokens, groups)
    assert not rows[int(groups.ends[-1]) :].any()
    grad = torch.ones_like(rows)
    grad[int(groups.ends[-1]) :] = torch.nan
    rows.backward(grad)
    assert torch.equal(tokens.grad, (index < 5).sum(1, keepdim=True).expand(-1, 4).float())


def test_a_missing_compiler_is_told_once_and_by_no_simulation(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(one_pass, "_kernels_run", functools.cache(one_pass._kernels_run.__wrapped__))
    with one_pass.simulated():
        assert one_pass.kernels_run()
    with pytest.warns(UserWarning, match=r"computed by torch's own operations.* Install `triton` and a C compiler"):
        assert not one_pass.kernels_run()
    assert not one_pass.kernels_run()
