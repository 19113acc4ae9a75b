"""Encode a weight as float8 in two layouts by one Triton kernel, which reads every value once.

This module imports Triton; import it when a kernel is needed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_lowprec.numerics.e4m3_kernel import e4m3_code

SIDE: Final = tl.constexpr(128)
"""Rows and columns of the tile that one program encodes."""


@triton.jit
def _tile(weight, codes, transposed, scale, rows, columns):  # type: ignore[no-untyped-def]
    """Encode the tile of this program; return the bits of the tile's largest absolute value."""
    row = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < columns)
    place = row * columns + column
    x = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    x = x * tl.load(scale)
    code = e4m3_code(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)))  # keeps NaN
    tl.store(codes + place, code, mask=inside)
    tl.store(transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(code), mask=tl.trans(inside))
    return largest


@triton.jit  # type: ignore[untyped-decorator]
def encode(  # type: ignore[no-untyped-def]
    weight, codes, transposed, scale, hint, found, rows, columns, MODE: tl.constexpr
):
    """Write ``cast(weight * scale)``: (rows, columns) and (columns, rows), float8_e4m3fn; finite values saturate.

    Args:
        weight: (rows, columns) float32, bfloat16 or float16, contiguous.
        codes: (rows, columns) int8, contiguous, the bits of float8_e4m3fn.
        transposed: (columns, rows) int8, contiguous.
        scale: () float32.
        hint: () int32, what ``found`` is expected to be; read by "mend".
        found: () int32, the bits of the largest absolute value; "check" raises it, "mend" reads it.
        rows: a multiple of 16.
        columns: a multiple of 16.
        MODE: "plain"; "check", which also measures; "mend", which encodes the weight if the hint was wrong.
    """
    if MODE == "mend":
        if tl.load(hint) != tl.load(found):
            _tile(weight, codes, transposed, scale, rows, columns)
    else:
        largest = _tile(weight, codes, transposed, scale, rows, columns)
        if MODE == "check":  # numbers that are not negative are in the order of their bits, and a NaN is the largest
            tl.atomic_max(found, largest)
