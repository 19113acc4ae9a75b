"""Gradients in float8 with a scale per 128 values: the codec against its formula, in exact arithmetic."""

import math

import pytest
import torch

from lightning_lowprec.numerics import fp8_blocks
from tests.numerics.fp8_block_cases import BLOCK, SIZES, nearest, rows, with_lost_numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decoded(values):
    total = torch.empty_like(values, dtype=torch.float32)
    fp8_blocks.decode_sum_(total, fp8_blocks.to_bytes(values)[None])
    return total


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_every_block_is_the_formulas(n, dtype):
    values = rows(n, dtype)
    found = decoded(values)
    for row, got in zip(values[:, :300].double(), found[:, :300].double(), strict=True):
        for start in range(0, min(n, 300) - BLOCK + 1, BLOCK) or [0]:
            block = row[start : start + BLOCK]
            scale = min(448 / max(block.abs().max().item(), 1e-300), 2.0**120)
            wanted = torch.tensor([nearest(x * scale) / scale for x in block.tolist()], dtype=torch.float64)
            far = (got[start : start + BLOCK] - wanted).abs() > 1e-6 * wanted.abs() + 1e-44
            # a value half way between two codes may go to either, because the scale is rounded to float32
            ties = ((block * scale - wanted * scale).abs() * (1 + 1e-5)) >= _half_step(wanted * scale)
            assert not (far & ~ties).any()


def _half_step(codes):
    exponent = torch.frexp(codes.abs().clamp(min=2.0**-6))[1] - 1
    return torch.exp2(exponent.double() - 4)


@pytest.mark.parametrize("n", SIZES)
def test_the_bytes_of_a_row(n):
    sent = fp8_blocks.to_bytes(rows(n))
    assert sent.dtype is torch.uint8
    assert sent.shape == (3, fp8_blocks.row_bytes(n))
    wanted = n + 4 * math.ceil(n / BLOCK)
    assert wanted <= sent.shape[1] < wanted + 16
    assert sent.shape[1] % 16 == 0
    assert fp8_blocks.BYTES_PER_VALUE == 1.03125


def test_the_largest_value_of_a_block_is_exact_and_the_signal_is_30_db_above_the_error():
    values = torch.randn(1, 1 << 16, generator=torch.Generator().manual_seed(0)) ** 3
    found = decoded(values)
    largest = values.view(-1, BLOCK).abs().argmax(1, keepdim=True)
    one, other = (x.view(-1, BLOCK).gather(1, largest) for x in (values, found))
    torch.testing.assert_close(one, other, rtol=2.0**-22, atol=0)
    assert 10 * torch.log10(values.square().sum() / (values - found).square().sum()) > 30


def test_a_row_does_not_see_the_scales_of_another_row_or_of_the_next_block():
    small, large = torch.full((1, 200), 1e-6), torch.full((1, 200), 1e6)
    torch.testing.assert_close(decoded(torch.cat([small, large]))[:1], decoded(small), rtol=0, atol=0)
    values = torch.cat([torch.full((1, BLOCK), 1e6), torch.full((1, 5), 1e-6)], 1)
    torch.testing.assert_close(decoded(values)[:, BLOCK:], torch.full((1, 5), 1e-6), rtol=1e-6, atol=0)


def test_values_32768_times_smaller_than_their_block_keep_the_precision_of_float8():
    """2**15: from 448, which is 1.75 * 2**8, down to 2**-6, the smallest normal number, times 1.1."""
    values = torch.full((1, BLOCK), 448 * 2.0**-14 / 1.75 * 1.1)
    values[0, 0] = 448.0
    assert ((decoded(values) - values) / values).abs().max() <= 2.0**-4


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_inf_and_nan_arrive_and_stay_in_their_block(n, dtype):
    values = with_lost_numbers(n, dtype)
    found = decoded(values)
    assert found[0, 0] == -math.inf
    assert found[1, -1].isnan()
    last = (n - 1) // BLOCK * BLOCK
    assert not found[0, :BLOCK].isfinite().any()
    assert not found[1, last:].isfinite().any()
    clean = decoded(rows(n, dtype))
    for row, kept in ((0, slice(BLOCK, n)), (1, slice(0, last)), (2, slice(0, n))):
        assert torch.equal(found[row, kept], clean[row, kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_ranks_are_summed_in_float32(dtype):
    """Each rank's numbers are exact in float8; a sum in float8 or bfloat16 would lose all but the first."""
    ranks = torch.full((16, 2, 300), 0.5)
    ranks[0] = 256.0
    sent = torch.stack([fp8_blocks.to_bytes(values) for values in ranks])
    total = torch.empty(2, 300, dtype=dtype)
    fp8_blocks.decode_sum_(total, sent)
    assert torch.equal(total, torch.full((2, 300), 256 + 7.5, dtype=dtype))
    fp8_blocks.decode_sum_(total, sent, 1 / 16)
    assert torch.equal(total, torch.full((2, 300), (256 + 7.5) / 16, dtype=dtype))


def test_nothing_to_send():
    assert fp8_blocks.to_bytes(torch.empty(2, 0)).shape == (2, 0)
    total = torch.empty(1, 0)
    fp8_blocks.decode_sum_(total, torch.empty(2, 1, 0, dtype=torch.uint8))
