"""The kernels of float8 rows write the bytes of the code without a kernel, bit for bit."""

import pytest
import torch

from lightning_lowprec.numerics import fp8_blocks
from tests.numerics.fp8_block_cases import SIZES, with_lost_numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(one, other):
    """Equal in every bit, or NaN in both."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0), other.nan_to_num(0))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy's, of inf and NaN
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_the_kernels_bytes_and_sums(monkeypatch, n, dtype):
    ranks = torch.stack([with_lost_numbers(n, dtype), with_lost_numbers(n, dtype).flip(1)])
    eager = torch.stack([fp8_blocks.to_bytes(values) for values in ranks])
    sums = torch.empty(2, 3, n, dtype=dtype)
    for total, factor in zip(sums, (1.0, 1 / 3), strict=True):
        fp8_blocks.decode_sum_(total, eager, factor)
    monkeypatch.setattr(fp8_blocks, "DEVICES", {"cpu"})
    launched = []
    launch = fp8_blocks._launch
    monkeypatch.setattr(fp8_blocks, "_launch", lambda name, *rest: (launched.append(name), launch(name, *rest)))
    for values, wanted in zip(ranks, eager, strict=True):
        found = fp8_blocks.to_bytes(values)
        scales = 4 * -(-n // 128)
        assert same(found[:, :scales].view(torch.float32), wanted[:, :scales].view(torch.float32))
        codes, expected = (x[:, scales : scales + n].view(torch.float8_e4m3fn).float() for x in (found, wanted))
        assert same(codes, expected)
        assert torch.equal(codes.signbit() | codes.isnan(), expected.signbit() | expected.isnan())
    for total, factor in zip(sums, (1.0, 1 / 3), strict=True):
        found = torch.empty_like(total)
        fp8_blocks.decode_sum_(found, eager, factor)
        assert same(found, total)
    assert launched == ["encode_blocks"] * 2 + ["decode_sum"] * 2
