"""Triton kernels of codes: they write the same bits on every device. Importing this module imports Triton.

Numbers that are not negative are in the order of their bits as integers, and a NaN is the largest: so the kernels find
largest absolute values, where floating-point operations would lose a NaN.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# ---- float8_e4m3fn and bfloat16 with integers


@triton.jit
def e4m3_code(x):  # type: ignore[no-untyped-def]
    """Return float8_e4m3fn as int8: float32, to the nearest, ties to even; finite values saturate, NaN stays."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    shift = 16384.0  # the last place of its float32 neighbours is 2**-9, as that of float8's small numbers
    small = (magnitude.to(tl.float32, bitcast=True) + shift).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)  # below 2**-6
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _bf16_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of bfloat16 as int16: float32, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0).to(tl.int16)


# ---- the formats of `block_floats`, inside of other kernels


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


# ---- a factor that is often one

FACTOR_BLOCK: Final = tl.constexpr(1 << 13)
"""Elements that one program multiplies."""


@triton.jit(do_not_specialize=("size",))  # type: ignore[untyped-decorator]
def multiply(values, factor, size, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """``values *= factor``, computed in float32, for (size,) values, with ``BF16`` as int16, and (1,) float32."""
    number = tl.load(factor)
    if number != 1.0:
        places = tl.program_id(0).to(tl.int64) * FACTOR_BLOCK + tl.arange(0, FACTOR_BLOCK)
        inside = places < size
        x = tl.load(values + places, mask=inside)
        if BF16:
            y = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) * number
            tl.store(values + places, _bf16_bits(y), mask=inside)
        else:
            tl.store(values + places, (x.to(tl.float32) * number).to(values.dtype.element_ty), mask=inside)


# ---- a weight in two layouts, by one scale

SIDE: Final = tl.constexpr(128)
"""Rows and columns of the tile that one program encodes."""


@triton.jit  # type: ignore[untyped-decorator]
def _scale(bits, VISIBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `formats.largest_scale`, or with ``VISIBLE`` `formats.visible_scale`, of a largest value: int32 bits."""
    amax = bits.to(tl.float32, bitcast=True)
    if VISIBLE:
        exponent = 8 + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2**8
        exponent = tl.where(exponent > 126, 126, tl.where(exponent < -126, -126, exponent))
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bits == 0, 1.0, tl.where(bits >= 0x7F800000, float("nan"), scale))
    else:
        exact = amax.to(tl.float64)
        scale = (448.0 / tl.where(exact < 1e-12, 1e-12, exact)).to(tl.float32)  # keeps NaN
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    weight, codes, transposed, bits, rows, columns, VISIBLE: tl.constexpr, ENCODES: tl.constexpr
):
    """Encode the tile of this program by the scale of a largest value; return the bits of the tile's own."""
    row = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < columns)
    place = row * columns + column
    x = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    if ENCODES:
        code = e4m3_code(x * _scale(bits, VISIBLE))
        codes = codes.to(tl.pointer_type(tl.int8), bitcast=True)
        transposed = transposed.to(tl.pointer_type(tl.int8), bitcast=True)
        tl.store(codes + place, code, mask=inside)
        tl.store(transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(code), mask=tl.trans(inside))
    return largest


@triton.jit  # type: ignore[untyped-decorator]
def encode_weight(  # type: ignore[no-untyped-def]
    weight, codes, transposed, scale, inverse, hint, amax, rows, columns, MODE: tl.constexpr, VISIBLE: tl.constexpr
):
    """Write ``cast(weight * scale)``: (rows, columns) and (columns, rows), float8_e4m3fn as int8; all are contiguous.

    ``hint``, () float32, is what the largest absolute value probably is; ``amax``, () int32, are the bits of what it
    is. They are found and used in two launches, by ``MODE``: "measure" raises ``amax``, and "encode" encodes by it; or
    "check" encodes by the hint and raises ``amax``, and "mend" encodes if they differ. The second one writes ``scale``
    and its ``inverse``, () float32.
    """
    if MODE == "encode" or MODE == "mend":
        number = _scale(tl.load(amax), VISIBLE)
        tl.store(scale, number)  # by every program, the same
        tl.store(inverse, tl.div_rn(1.0, number))
    if MODE == "mend":
        if tl.load(hint).to(tl.int32, bitcast=True) != tl.load(amax):
            _tile(weight, codes, transposed, tl.load(amax), rows, columns, VISIBLE, True)
    elif MODE == "encode":
        _tile(weight, codes, transposed, tl.load(amax), rows, columns, VISIBLE, True)
    else:
        bits = tl.load(hint).to(tl.int32, bitcast=True) if MODE == "check" else 0
        tl.atomic_max(amax, _tile(weight, codes, transposed, bits, rows, columns, VISIBLE, MODE == "check"))


def both_layouts(
    weight: Tensor, hint: Tensor | None, visible: bool, kernel: Any = encode_weight, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, (N, K), the transposed codes, (K, N), their scale and its reciprocal, () float32.

    ``dtype``: float8_e4m3fn, or int8, which Triton knows on GPUs without FP8 too.
    """
    (height, width), device = weight.shape, weight.device
    rows, columns = (torch.empty(shape, dtype=dtype, device=device) for shape in (weight.shape, (width, height)))
    scale, inverse = torch.empty(1, device=device), torch.empty(1, device=device)
    amax = torch.zeros(1, dtype=torch.int32, device=device)
    launch = kernel[-(-width // SIDE.value), -(-height // SIDE.value)]
    given = weight, rows, columns, scale, inverse, hint, amax, height, width
    for mode in ("measure", "encode") if hint is None else ("check", "mend"):
        launch(*given, MODE=mode, VISIBLE=visible, num_warps=8)
    return rows, columns, scale.view(()), inverse.view(())


@triton_op("lightning_lowprec::traced_layouts", mutates_args={})
def traced_layouts(weight: Tensor, hint: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return :func:`both_layouts` by torchao's scale, for compilers, which launch the kernel themselves."""
    return both_layouts(weight, hint, False, wrap_triton(encode_weight), torch.float8_e4m3fn)


# ---- rows along the rows of each group

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

    ``rows``: (count, width), contiguous. ``ends``: (groups,) int32. ``codes``: (width, count) uint8. ``inverse``:
    (groups, width) float32. ``POWER_OF_2``: whether scales are rounded down to powers of two.
    """
    group = tl.program_id(0)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    largest = tl.full((1, WIDTH), 0, tl.int32)
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
        code = e4m3_code(x)
        inside = (row < last) & (column < width)
        target = tl.trans(column).to(tl.int64) * count + tl.trans(row)
        tl.store(codes + target, tl.trans(code).to(tl.uint8, bitcast=True), mask=tl.trans(inside))
        start += HEIGHT
