"""Multiply a tensor in place by a factor that is often one: the kernel reads the factor first.

This module imports Triton; import it when a kernel is needed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

BLOCK: Final = tl.constexpr(1 << 13)
"""Elements that one program multiplies."""


@triton.jit(do_not_specialize=("size",))  # type: ignore[untyped-decorator]
def multiply(values, factor, size, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """``values *= factor``, computed in float32; nothing is read or written if the factor is 1.

    Args:
        values: (size,) float32 or float16; the bits of bfloat16 as int16, so that rounding is the same on every device.
        factor: (1,) float32.
        size: the number of elements.
        BF16: whether the values are bfloat16.
    """
    number = tl.load(factor)
    if number != 1.0:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        x = tl.load(values + places, mask=inside)
        if BF16:
            y = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) * number
            bits = y.to(tl.int32, bitcast=True)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            tl.store(values + places, tl.where(y == y, nearest, 0x7FC0).to(tl.int16), mask=inside)
        else:
            tl.store(values + places, (x.to(tl.float32) * number).to(values.dtype.element_ty), mask=inside)
