"""The rows of ``fp8_blocks``, encoded and decoded by one Triton kernel each, with the same bits as on CPU.

This module imports Triton; import it when a kernel is needed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_lowprec.numerics.e4m3_kernel import e4m3_code

BLOCK: Final = tl.constexpr(128)
"""Values that share a scale."""
BLOCKS: Final = tl.constexpr(32)
"""Blocks of one program."""
LARGEST_SCALE: Final = tl.constexpr(2.0**120)


@triton.jit
def _places(n):  # type: ignore[no-untyped-def]
    """Return the numbers of this program's blocks, (BLOCKS, 1), and of their values, (BLOCKS, BLOCK)."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    return block, block * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit(do_not_specialize=("n",))  # type: ignore[untyped-decorator]
def encode(values, sent, inv_scales, n, size, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the bytes of one row of values.

    Args:
        values: (rows, n) float32 or float16; the bits of bfloat16 as int16.
        sent: (rows, size) uint8.
        inv_scales: the memory of ``sent`` as float32.
        n: values of a row.
        size: bytes of a row, a multiple of 16.
        BF16: whether the values are bfloat16.
    """
    row = tl.program_id(1).to(tl.int64)
    blocks = (n + BLOCK - 1) // BLOCK
    block, place = _places(n)
    if BF16:
        bits = tl.load(values + row * n + place, mask=place < n, other=0)
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = tl.load(values + row * n + place, mask=place < n, other=0.0).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]  # a NaN is the largest
    amax = largest.to(tl.float32, bitcast=True)
    finite = largest < 0x7F800000
    dividend = tl.full(amax.shape, 448.0, tl.float32)
    scale = tl.div_rn(dividend, tl.where(finite & (largest > 0), amax, 1.0))
    scale = tl.where(largest > 0, tl.where(scale < LARGEST_SCALE, scale, LARGEST_SCALE), LARGEST_SCALE)
    scale = tl.where(finite, scale, 1.0)
    inverse = tl.where(finite, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), amax)
    tl.store(inv_scales + row * (size // 4) + block, inverse, mask=block < blocks)
    x = x * scale
    codes = e4m3_code(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)))  # keeps NaN
    tl.store(sent + row * size + blocks * 4 + place, codes.to(tl.uint8, bitcast=True), mask=place < n)


@triton.jit(do_not_specialize=("n",))  # type: ignore[untyped-decorator]
def decode_sum(  # type: ignore[no-untyped-def]
    total, sent, inv_scales, n, size, factor, RANKS: tl.constexpr, BF16: tl.constexpr
):
    """Write the sum over ranks of one row, times ``factor``.

    Args:
        total: (rows, n) float32 or float16; the bits of bfloat16 as int16.
        sent: (ranks, rows, size) uint8.
        inv_scales: the memory of ``sent`` as float32.
        n: values of a row.
        size: bytes of a row, a multiple of 16.
        factor: float32.
        RANKS: terms of the sum.
        BF16: whether the total is bfloat16.
    """
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1).to(tl.int64)
    blocks = (n + BLOCK - 1) // BLOCK
    block, place = _places(n)
    y = tl.full((BLOCKS, BLOCK), 0.0, tl.float32)
    for rank in range(RANKS):
        start = (rank * rows + row) * size
        code = tl.load(sent + start + blocks * 4 + place, mask=place < n, other=0).to(tl.int32)
        magnitude = code & 0x7F
        normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        value = tl.where(magnitude > 7, normal, magnitude.to(tl.float32) * 0.001953125)  # 2**-9
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where(code > 0x7F, -value, value)
        y += value * tl.load(inv_scales + start // 4 + block, mask=block < blocks, other=0.0)
    y = y * factor
    if BF16:
        bits = y.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(total + row * n + place, tl.where(y == y, nearest, 0x7FC0).to(tl.int16), mask=place < n)
    else:
        tl.store(total + row * n + place, y.to(total.dtype.element_ty), mask=place < n)
