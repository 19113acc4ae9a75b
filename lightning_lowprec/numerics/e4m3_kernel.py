"""The cast to float8_e4m3fn in Triton, with integers: the same codes on every device. Importing this imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
