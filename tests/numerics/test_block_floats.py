"""Numbers of 8 bits with an exponent per block: the values that exist, and how others are rounded."""

import math

import pytest
import torch

from lightning_lowprec.numerics.block_floats import E4M3, E5M3, NAN_EXPONENT, block_size, from_blocks, to_blocks

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M3], ids=["e4m3", "e5m3"])
SMALLEST = {E4M3: 2.0**-17, E5M3: 2.0**-33}
"""The smallest positive number of a block whose largest number is 1: 2**(1 - the largest field - bits of mantissa)."""
BLOCK = 32


def bits_of(count, seed=0):
    return torch.randint(0, 1 << 16, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def block(*first):
    """A block that begins with these numbers and ends with zeros."""
    return torch.tensor([*first, *[0.0] * (BLOCK - len(first))])


def around(values, format, seed=0):
    codes, exponents = to_blocks(values, bits_of(values.numel(), seed), BLOCK, format)
    return from_blocks(codes, exponents, BLOCK, format)


@FORMATS
def test_the_mean_over_all_random_bits_is_the_value(format):
    values = block(1.5, *(10.0 ** (-i / 4) for i in range(1, 31)))
    values = torch.where(values < SMALLEST[format], 0.0, values)  # second moments never round to zero
    rows = 1 << 16
    bits = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, BLOCK).reshape(-1)
    codes, exponents = to_blocks(values.repeat(rows), bits, BLOCK, format)
    found = from_blocks(codes, exponents, BLOCK, format).view(rows, BLOCK).double()
    steps = torch.tensor([max(2.0 ** (math.frexp(v)[1] - 1 - format.mantissa), SMALLEST[format]) for v in values])
    assert ((found.mean(0) - values).abs() <= steps * 2.0**-16).all(), "16 random bits say no more"
    assert ((found - values).abs() < steps).all(), "one of the two neighbours"
    assert found[:, 1:20].std(0).min() > 0, "really at random"


@FORMATS
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
        values = from_blocks(rows.view(-1).to(torch.uint8).view(format.dtype), exponents, BLOCK, format)
        assert torch.equal(around(values, format, seed=exponent), values)
        assert values.unique().numel() == (2 * largest + 1 if format.signed else largest + 1)


@FORMATS
def test_range_beside_the_largest_number(format):
    small = SMALLEST[format]
    assert around(block(1.0, small), format)[1] == small
    below = torch.stack([around(block(1.0, small / 4), format, seed)[1] for seed in range(64)])
    if format.signed:
        assert set(below.tolist()) == {0.0, small}
        assert torch.equal(around(block(-1.0, -small), format), block(-1.0, -small))
    else:
        assert set(below.tolist()) == {small}, "Adam divides by its root"


def test_codes_are_torchs_float8_times_a_power_of_two():
    """The largest binade of a block is the largest binade of the float8: 2**8."""
    values = torch.rand(64, BLOCK, generator=torch.Generator().manual_seed(0)).pow(8).view(-1) * 1e-3
    codes, exponents = to_blocks(values, bits_of(values.numel()), BLOCK, E4M3)
    assert codes.dtype == E4M3.dtype
    scales = 2.0 ** (exponents.double() - 127) * 2.0**-8
    expected = codes.double().view(-1, BLOCK) * scales[:, None]
    assert torch.equal(from_blocks(codes, exponents, BLOCK, E4M3).double(), expected.view(-1))


@FORMATS
def test_blocks_of_zeros_and_blocks_with_nan_or_inf(format):
    assert torch.equal(around(torch.zeros(BLOCK), format), torch.zeros(BLOCK))
    for lost in (math.nan, math.inf):
        values = torch.cat([block(1.0, lost), block(2.0)])
        codes, exponents = to_blocks(values, bits_of(2 * BLOCK), BLOCK, format)
        assert exponents.tolist() == [NAN_EXPONENT, 128], "2 is 2**(128 - 127)"
        found = from_blocks(codes, exponents, BLOCK, format)
        assert found[:BLOCK].isnan().all()
        assert torch.equal(found[BLOCK:], block(2.0)), "other blocks do not notice"


@FORMATS
def test_the_ends_of_float32(format):
    """No number is rounded up to a float32 that does not exist, and the least blocks do not become NaN."""
    largest = torch.finfo(torch.float32).max
    found = around(block(largest), format)
    assert found.isnan().all() or found[0] <= largest
    assert around(block(2.0**126), format)[0] == 2.0**126
    assert around(block(2.0**-126), format)[0] == 2.0**-126
    assert torch.equal(around(block(2.0**-140), format), torch.zeros(BLOCK)), "subnormal numbers are zero"


@pytest.mark.parametrize(("row", "size"), [(4096, 256), (96, 32), (384, 128), (100, 0), (16, 0)])
def test_blocks_divide_rows(row, size):
    assert block_size(row) == size
