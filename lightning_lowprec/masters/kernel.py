"""One optimizer step of many parameters with masters, as one Triton kernel: every value is read and written once.

A row of the table of addresses is a parameter. A program steps ``TILE`` elements of one parameter, so that a launch
takes any number of parameters of any shapes. This module imports Triton; import it when a kernel is needed.

No library has this step: by the ledger it moves 26 bytes per parameter with ``bf16-remainder`` and 28 with
``bf16-master``, where torch's operations move 110 and 48 (``OPTIMIZER_BYTES`` of tests/ledger/budgets.py).

Operations and their order are those of torch's single-tensor ``AdamW``, ``Adam`` and ``SGD``, in float32. The random
bits are those of :func:`lightning_lowprec.numerics.rounding.random_bits`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_lowprec.numerics.kernels import decoded, encoded

TILE: Final = tl.constexpr(1 << 16)  # elements of a parameter that one program steps
BLOCK: Final = tl.constexpr(1 << 11)  # elements that one program holds at a time
COLUMNS: Final = tl.constexpr(10)
"""Addresses of a parameter (weight, master or remainder, gradient, first and second moment, exponents of the first and
second moment; 0: there is none), its number of elements, the position of its first element among all parameters, and
the address of a number that becomes the largest absolute value of the new weight if it is smaller (float32; 0: nobody
wants it)."""
NUMBERS: Final = tl.constexpr(9)  # float32 numbers of a parameter, see `kernel_step.numbers_of`
_CHUNK: Final = tl.constexpr(1 << 22)  # elements that share the keys of the random bits, see numerics/rounding.py


@triton.jit
def _mixed(z):  # type: ignore[no-untyped-def]
    """Return the finalizer of splitmix64, as ``rounding._keys`` has it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _random(position, first, seed, step):  # type: ignore[no-untyped-def]
    """Return 16 random bits per element at ``position``, int64; ``first`` is the smallest position."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    start = _mixed(_mixed(seed.to(tl.uint64) + golden) + step.to(tl.uint64) + golden) + golden
    chunk = first - first % _CHUNK
    here = _mixed(start + chunk.to(tl.uint64))
    after = _mixed(start + (chunk + _CHUNK).to(tl.uint64))
    keys = tl.where(position < chunk + _CHUNK, here, after)
    low = (keys & 0xFFFFFFFF).to(tl.uint32) - 0x80000000
    high = (keys >> 32).to(tl.uint32) - 0x80000000
    x = ((position % _CHUNK) >> 1).to(tl.uint32) + low
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.where((position & 1) == 0, x & 0xFFFF, x >> 16).to(tl.int32)


@triton.jit
def _pointer(table, COLUMN: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a pointer from the table; bf16 values are read as int16."""
    address = tl.load(table + COLUMN)
    if KIND == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "uint8":
        pointer = address.to(tl.pointer_type(tl.uint8))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(pointer, ALIGN)


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of float32 values, of every NaN the same."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _load(pointer, mask, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(pointer, mask=mask)
    if KIND == "bf16":
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _store_upper(pointer, bits, mask):  # type: ignore[no-untyped-def]
    """Store the upper halves of float32 bits: bf16. Return the bits of the stored values, as float32."""
    tl.store(pointer, (bits >> 16).to(tl.int16), mask=mask)
    return (bits >> 16) << 16


@triton.jit
def _load_moment(  # type: ignore[no-untyped-def]
    table, first, offsets, mask, size,
    KIND: tl.constexpr, ALIGN: tl.constexpr, GROUP: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Return a moment of the elements at ``offsets``, float32: the first one, or the second one, never negative."""
    if KIND == "8bit":
        codes = tl.load(_pointer(table, 3 + SECOND, "uint8", ALIGN) + offsets, mask=mask)
        exponents, blocks, inside = _exponents(table, first, size, GROUP, SECOND)
        shared = tl.load(exponents + blocks, mask=inside, other=0)
        x = decoded(codes, shared, GROUP, 3, 31 if SECOND else 15, SECOND == 0)
    else:
        x = _load(_pointer(table, 3 + SECOND, KIND, ALIGN) + offsets, mask, KIND)
    return x


@triton.jit
def _exponents(table, first, size, GROUP: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pointer to all exponents of a moment, the blocks at hand, and which of them exist."""
    pointer = tl.load(table + 5 + SECOND).to(tl.pointer_type(tl.uint8))
    blocks = first // GROUP + tl.arange(0, BLOCK // GROUP)
    return pointer, blocks, blocks * GROUP < size


@triton.jit
def _store_moment(  # type: ignore[no-untyped-def]
    table, first, offsets, x, mask, size, position, start, seed, step,
    KIND: tl.constexpr, ALIGN: tl.constexpr, GROUP: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    if KIND == "8bit":
        random = _random(position, start, seed + ((1 + SECOND) << 32), step)
        codes, shared = encoded(x, random, GROUP, 3, 31 if SECOND else 15, 7 if SECOND else 6, SECOND == 0)
        tl.store(_pointer(table, 3 + SECOND, "uint8", ALIGN) + offsets, codes, mask=mask)
        exponents, blocks, inside = _exponents(table, first, size, GROUP, SECOND)
        tl.store(exponents + blocks, shared, mask=inside)
    else:
        tl.store(_pointer(table, 3 + SECOND, KIND, ALIGN) + offsets, x, mask=mask)


@triton.jit
def _load_master(weight, extra, mask, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    if FORM == "fp32":
        return tl.load(extra, mask=mask)
    value = _load(weight, mask, "bf16")
    if FORM == "remainder":
        low = tl.load(extra, mask=mask).to(tl.int32)
        low = tl.where((value == 0) & (low < 0), 0, low)  # a weight that was set to zero, see rounding.join_
        value = (value.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _store_master(  # type: ignore[no-untyped-def]
    weight, extra, x, mask, position, first, seed, step, FORM: tl.constexpr, KIND: tl.constexpr
):
    """Store master and weight; return the bits of the weight, as float32."""
    bits = _bits(x)
    if FORM == "remainder":
        stored = _store_upper(weight, bits + 0x8000, mask)
        tl.store(extra, bits.to(tl.int16), mask=mask)
    elif FORM == "stochastic":
        stored = _store_upper(weight, bits + _random(position, first, seed, step), mask)
    else:
        tl.store(extra, x, mask=mask)
        if KIND == "fp16":
            half = x.to(tl.float16)
            tl.store(weight, half, mask=mask)
            stored = _bits(half.to(tl.float32))
        else:  # to the nearest, ties to even
            stored = _store_upper(weight, tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits), mask)
    return stored


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    row, begin, offsets, mask, size, position, first, table, numbers, factor, seed, step,
    RULE: tl.constexpr, FORM: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr,
    ALIGN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Step some elements of a parameter; return the bits of their new weights, as float32."""
    table += row * COLUMNS
    numbers += row * NUMBERS
    weight = _pointer(table, 0, WEIGHT, ALIGN) + offsets
    KEPT: tl.constexpr = "int16" if FORM == "remainder" else "fp32"
    extra = _pointer(table, 1, KEPT, ALIGN) + offsets
    grad = _pointer(table, 2, GRAD, ALIGN) + offsets
    x = _load_master(weight, extra, mask, FORM)
    g = _load(grad, mask, GRAD) * factor * tl.load(numbers)
    penalty = tl.load(numbers + 1)
    g = tl.where(penalty == 0, g, g + penalty * x)  # a weight that is infinite must not make its gradient NaN
    if RULE == "adam":
        m = _load_moment(table, begin, offsets, mask, size, MOMENT, ALIGN, GROUP, 0)
        v = _load_moment(table, begin, offsets, mask, size, MOMENT, ALIGN, GROUP, 1)
        share = tl.load(numbers + 3)
        m = tl.where(share < 0.5, m + share * (g - m), g - (g - m) * (1 - share))
        v = v * tl.load(numbers + 4) + tl.load(numbers + 5) * g * g
        x = x * tl.load(numbers + 2)
        root = tl.div_rn(tl.sqrt_rn(v), tl.load(numbers + 8)) + tl.load(numbers + 7)
        x = x + tl.div_rn(tl.load(numbers + 6) * m, root)
        _store_moment(table, begin, offsets, v, mask, size, position, first, seed, step, MOMENT, ALIGN, GROUP, 1)
        _store_moment(table, begin, offsets, m, mask, size, position, first, seed, step, MOMENT, ALIGN, GROUP, 0)
    else:
        if RULE != "sgd":
            m = _load_moment(table, begin, offsets, mask, size, MOMENT, ALIGN, GROUP, 0)
            m = tl.load(numbers + 3) * m + tl.load(numbers + 4) * g
            _store_moment(table, begin, offsets, m, mask, size, position, first, seed, step, MOMENT, ALIGN, GROUP, 0)
            g = g + tl.load(numbers + 3) * m if RULE == "nesterov" else m
        x = x + tl.load(numbers + 6) * g
    return _store_master(weight, extra, x, mask, position, first, seed, step, FORM, WEIGHT)


@triton.jit(do_not_specialize=("seed", "step"), do_not_specialize_on_alignment=("numbers",))
def step_parameters(  # type: ignore[no-untyped-def]
    tiles, table, numbers, factor, seed, step,
    RULE: tl.constexpr, FORM: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, MEASURE: tl.constexpr,
):  # fmt: skip
    """Step all parameters of a table once; a program steps one tile."""
    seed = seed.to(tl.int64)
    step = step.to(tl.int64)
    program = tl.program_id(0)
    row = tl.load(tiles + 2 * program).to(tl.int64)
    begin = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
    size = tl.load(table + row * COLUMNS + 7)
    position = tl.load(table + row * COLUMNS + 8) + begin
    scale = tl.load(factor)
    largest = tl.full((BLOCK,), 0, tl.int32)
    for offset in range(0, TILE, BLOCK):
        inside = offset + tl.arange(0, BLOCK)
        offsets = begin + inside
        if begin + offset + BLOCK <= size:  # without a mask, loads and stores are as wide as the hardware's
            new = _block(row, begin + offset, offsets, None, size, position + inside, position + offset, table, numbers,
                         scale, seed, step, RULE, FORM, WEIGHT, GRAD, MOMENT, ALIGN, GROUP)  # fmt: skip
            largest = tl.maximum(largest, new & 0x7FFFFFFF)
        elif begin + offset < size:
            new = _block(row, begin + offset, offsets, offsets < size, size, position + inside, position + offset,
                         table, numbers, scale, seed, step, RULE, FORM, WEIGHT, GRAD, MOMENT, ALIGN, GROUP)  # fmt: skip
            largest = tl.maximum(largest, tl.where(offsets < size, new & 0x7FFFFFFF, 0))
    if MEASURE:  # numbers that are not negative are in the order of their bits, and a NaN is the largest
        address = tl.load(table + row * COLUMNS + 9)
        if address != 0:
            tl.atomic_max(address.to(tl.pointer_type(tl.int32)), tl.max(largest, 0))
