"""Encode many weights as float8 in two layouts by one Triton kernel, which reads every value once.

The codes are computed with integers, so that they are the same on every device. This module imports Triton; import it
when a kernel is needed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

SIDE: Final = tl.constexpr(128)
"""Rows and columns of the tile that one program encodes."""
COLUMNS: Final = tl.constexpr(6)
"""Of the table, per weight: addresses of weight, codes, transposed codes and scale; rows and columns, in 16s."""


@triton.jit
def e4m3_code(x):  # type: ignore[no-untyped-def]
    """Return float8_e4m3fn as int8: float32 in [-448, 448] or NaN, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    shift = 16384.0  # the last place of its float32 neighbours is 2**-9, as that of float8's small numbers
    small = (magnitude.to(tl.float32, bitcast=True) + shift).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)  # below 2**-6
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _tile(tiles, table, program, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode one tile; return the bits of its largest absolute value."""
    entry = table + tl.load(tiles + 3 * program) * COLUMNS
    rows = tl.load(entry + 4) * 16  # as factors, so that the compiler knows that they are multiples of 16
    columns = tl.load(entry + 5) * 16
    row = tl.load(tiles + 3 * program + 1).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.load(tiles + 3 * program + 2).to(tl.int64) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < columns)
    place = row * columns + column
    weight = tl.load(entry)
    if KIND == "fp32":
        x = tl.load(tl.multiple_of(weight.to(tl.pointer_type(tl.float32)), 16) + place, mask=inside, other=0.0)
    elif KIND == "fp16":
        half = tl.load(tl.multiple_of(weight.to(tl.pointer_type(tl.float16)), 16) + place, mask=inside, other=0.0)
        x = half.to(tl.float32)
    else:
        bits = tl.load(tl.multiple_of(weight.to(tl.pointer_type(tl.int16)), 16) + place, mask=inside, other=0)
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    x = x * tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.float32)))
    codes = e4m3_code(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)))  # keeps NaN
    tl.store(tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int8)), 16) + place, codes, mask=inside)
    target = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.int8)), 16)
    across = tl.trans(column) * rows + tl.trans(row)
    tl.store(target + across, tl.trans(codes), mask=tl.trans(inside))
    return largest


@triton.jit
def encode(tiles, table, hints, found, KIND: tl.constexpr, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ``cast(weight * scale)``: (rows, columns) and (columns, rows), float8_e4m3fn; finite values saturate.

    Args:
        tiles: (programs, 3) int32: which weight, tile row, tile column.
        table: (weights, 6) int64.
        hints: (weights,) int32, what ``found`` is expected to be; read by "mend".
        found: (weights,) int32, the bits of the largest absolute values; "check" raises them, "mend" reads them.
        KIND: the dtype of the weights.
        MODE: "plain"; "check", which also measures; "mend", which encodes the weights whose hint was wrong.
    """
    program = tl.program_id(0)
    number = tl.load(tiles + 3 * program)
    if MODE == "mend":
        if tl.load(hints + number) != tl.load(found + number):
            _tile(tiles, table, program, KIND)
    else:
        largest = _tile(tiles, table, program, KIND)
        if MODE == "check":  # numbers that are not negative are in the order of their bits, and a NaN is the largest
            tl.atomic_max(found + number, largest)
