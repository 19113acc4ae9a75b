"""The formats of ``block_floats``, inside of Triton kernels: the same values, bit for bit.

This module imports Triton; import it when a kernel is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def decoded(  # type: ignore[no-untyped-def]
    codes, exponents, BLOCK: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, SIGNED: tl.constexpr
):
    """(N,) uint8, (N / BLOCK,) uint8 -> (N,) float32."""
    bits = codes.to(tl.int32)
    magnitude = bits & 0x7F if SIGNED else bits
    field = magnitude >> MANTISSA
    mantissa = magnitude & ((1 << MANTISSA) - 1)
    normal = (((field + (127 - TOP)) << 23) | (mantissa << (23 - MANTISSA))).to(tl.float32, bitcast=True)
    small = mantissa.to(tl.float32) * (2.0 ** (1 - TOP - MANTISSA))
    values = tl.where(field > 0, normal, small)
    if SIGNED:
        values = tl.where(bits > 0x7F, -values, values)
    shared = exponents.to(tl.int32)
    inside = (shared > 0) & (shared < 255)
    scales = (tl.where(inside, shared, 127) << 23).to(tl.float32, bitcast=True)
    scales = tl.where(inside, scales, tl.where(shared == 0, 0.0, float("nan")))
    return tl.reshape(tl.reshape(values, (values.shape[0] // BLOCK, BLOCK)) * scales[:, None], (values.shape[0],))


@triton.jit  # type: ignore[untyped-decorator]
def encoded(  # type: ignore[no-untyped-def]
    values, random,
    BLOCK: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, LAST: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """(N,) float32, (N,) random int32 -> (N,) uint8, (N / BLOCK,) uint8."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    rows = tl.reshape(magnitude, (values.shape[0] // BLOCK, BLOCK))
    largest = tl.max(rows, 1)
    shared = largest >> 23
    above = (largest & 0x7FFFFF) > (LAST << (23 - MANTISSA))
    shared = tl.where(shared == 0, 0, shared + above.to(tl.int32))
    shared = tl.where(shared > 253, 255, shared)
    inside = (shared > 0) & (shared < 255)
    factors = (tl.where(inside, 254 - shared, 127) << 23).to(tl.float32, bitcast=True)
    scaled = tl.reshape(rows.to(tl.float32, bitcast=True) * factors[:, None], (values.shape[0],))
    bits = scaled.to(tl.int32, bitcast=True) + (random << (7 - MANTISSA))
    normal = (bits >> (23 - MANTISSA)) - ((127 - TOP) << MANTISSA)
    steps = scaled * (2.0 ** (TOP - 1 + MANTISSA)) + random.to(tl.float32) * (2.0**-16)
    small = tl.where(steps < 2.0**MANTISSA, steps, 2.0**MANTISSA).to(tl.int32)
    codes = tl.where(scaled < 2.0 ** (1 - TOP), small, normal)
    if SIGNED:
        codes = codes | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)
    else:
        codes = tl.where((values > 0) & (codes < 1), 1, codes)
    kept = tl.where(inside[:, None], tl.reshape(codes, (values.shape[0] // BLOCK, BLOCK)), 0)
    return tl.reshape(kept, (values.shape[0],)).to(tl.uint8), shared.to(tl.uint8)
