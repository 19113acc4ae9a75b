"""Encode rows along the rows of each group, by one Triton kernel. Importing this module imports Triton."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_lowprec.numerics.e4m3_kernel import e4m3_code

WIDTH: Final = tl.constexpr(64)
"""Columns of one program."""
HEIGHT: Final = tl.constexpr(64)
"""Rows that one program reads at a time."""


@triton.jit
def _values(rows, row, column, last, width):  # type: ignore[no-untyped-def]
    """Load a tile in float32, zero outside."""
    place = row.to(tl.int64) * width + column
    return tl.load(rows + place, mask=(row < last) & (column < width), other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def encode_columns(rows, ends, codes, inverse, count, width, POWER_OF_2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the codes of one group's columns, transposed; the group is read twice, once for the largest values.

    Args:
        rows: (count, width), contiguous.
        ends: (groups,) int32.
        codes: (width, count) uint8, the bits of float8_e4m3fn.
        inverse: (groups, width) float32.
        count: the number of all rows.
        width: the number of columns.
        POWER_OF_2: whether scales are rounded down to powers of two.
    """
    group = tl.program_id(0)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    largest = tl.full((1, WIDTH), 0, tl.int32)  # numbers that are not negative are in the order of their bits
    start = first
    while start < last:
        row = (start + tl.arange(0, HEIGHT))[:, None]
        bits = _values(rows, row, column, last, width).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(bits, 0)[None, :])
        start += HEIGHT
    amax = largest.to(tl.float32, bitcast=True)
    scale = (448.0 / tl.where(amax < 1e-12, 1e-12, amax).to(tl.float64)).to(tl.float32)  # keeps NaN
    if POWER_OF_2:
        rounded = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, rounded, scale)
    tl.store(inverse + group * width + column, tl.div_rn(1.0, scale), mask=column < width)
    start = first
    while start < last:
        row = (start + tl.arange(0, HEIGHT))[:, None]
        x = _values(rows, row, column, last, width) * scale
        code = e4m3_code(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)))
        inside = (row < last) & (column < width)
        target = tl.trans(column).to(tl.int64) * count + tl.trans(row)
        tl.store(codes + target, tl.trans(code).to(tl.uint8, bitcast=True), mask=tl.trans(inside))
        start += HEIGHT
