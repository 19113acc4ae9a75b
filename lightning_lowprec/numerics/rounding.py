"""Split float32 into bf16 and an exact remainder, or round it to 16 bits stochastically.

A bf16 is the upper half of a float32, so float32 -> bf16 is integer arithmetic on the bits.

* Remainder. Adding 0x8000 and dropping the lower half rounds to nearest, ties away from zero. The difference lies in
  [-0x8000, 0x7FFF] of the last place, the range of an int16: (bf16, int16) <-> float32 is a bijection. With ties to
  even, torch's own rounding, a tie may go either way: the difference has one value more, which an int16 cannot hold.
* Stochastic. Adding 16 random bits before dropping the lower half rounds up with a probability equal to the
  distance, so the expected value is the float32 (Gupta et al., arXiv 1502.02551, sec. 3.1). The bits are a function of
  a counter, without a generator: they are equal on every replica and every device, and there is no state to save.

The lower half of a NaN may have any bits, and an addition can carry into the sign, so every NaN becomes 0x7FC00000
first.
"""

import functools
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import HALF_DTYPES

_HALF: Final = 0x8000  # half of the last place of a bf16, in float32 bits
_UPPER: Final = -0x10000  # the bits that a bf16 keeps, as an int32
_LOWER: Final = 0xFFFF
_CHUNK: Final = 1 << 22  # elements, where an operation needs temporary memory; random bits have keys per chunk
_canonical_nan_: Final = functools.partial(
    torch.nan_to_num_, nan=float("nan"), posinf=float("inf"), neginf=-float("inf")
)
_MASK64: Final = (1 << 64) - 1


def split_(master: Tensor, remainder: Tensor) -> None:
    """Split in place: ``master`` (float32) keeps the nearest bf16 values, ``remainder`` (int16) gets the rest.

    NaN stays NaN; a value beyond the largest bf16 becomes inf, and its remainder brings it back.
    """
    bits = _canonical_nan_(master).view(torch.int32)
    remainder.copy_(bits)  # int32 -> int16 keeps the last bits
    bits.add_(_HALF).bitwise_and_(_UPPER)


def join_(upper: Tensor, remainder: Tensor) -> None:
    """Join in place: ``upper`` (float32, bf16 values, contiguous) becomes the master.

    An int8 is the upper half of a remainder: checkpoints of an earlier form have it.

    :func:`split_` never gives a zero a negative remainder. A zero with a negative remainder was set later (pruned), and
    adding the remainder would borrow from the sign and make a NaN, so the remainder is ignored.
    """
    flat, rest = upper.view(-1), remainder.view(-1)
    unit = 1 if remainder.dtype == torch.int16 else 1 << 8
    for offset in range(0, flat.numel(), _CHUNK):
        part, low = flat[offset : offset + _CHUNK], rest[offset : offset + _CHUNK]
        part.view(torch.int32).add_(torch.where(part == 0, low.clamp(min=0), low), alpha=unit)


def upper_half(master: Tensor) -> Tensor:
    """Return the bf16 half of :func:`split_`, ties away from zero: (...) float32 -> (...) bfloat16."""
    rounded = master.clone()
    split_(rounded, torch.empty_like(master, dtype=torch.int16))
    return rounded.bfloat16()


def reconcile(master: Tensor, weight: Tensor) -> Tensor:
    """Return ``master`` where it rounds to ``weight`` (either way at a tie), and ``weight`` where it was edited.

    (...) float32, (...) float16, bfloat16 or float32 -> (...) float32. A float32 weight may be a rounding to either.
    """
    dtypes = (weight.dtype,) if weight.dtype in HALF_DTYPES else HALF_DTYPES
    agrees = upper_half(master) == weight if torch.bfloat16 in dtypes else torch.zeros_like(weight, dtype=torch.bool)
    for dtype in dtypes:
        agrees |= master.to(dtype) == weight
    return torch.where(agrees, master, weight.float())


def stochastic_round_(flat: Tensor, *, seed: int, step: int, start: int = 0) -> None:
    """Round every value to one of its two neighbours, without bias: ``flat``, (N,) float32, gets bf16 values.

    bf16 values do not change, inf stays inf, NaN stays NaN; a value beyond the largest bf16 may become inf. ``step``
    counts the roundings. ``start`` is the position of the first element among all that share the ``seed`` of the run: a
    tensor that is rounded in parts gets the same bits.
    """
    for part, chunk, first in _chunks(_canonical_nan_(flat).view(torch.int32), start):
        part.add_(random_bits(part.numel(), seed, step, chunk, flat.device, first)).bitwise_and_(_UPPER)


def random_bits(
    count: int, seed: int, step: int, start: int, device: torch.device | str = "cpu", first: int = 0
) -> Tensor:
    """Return ``count`` uniform values in [0, 65536): (count,) int32, a pure function of the arguments on every device.

    Every value pair is a 32-bit hash of a counter. The hash has two rounds; (seed, step, start) gives the keys that are
    added before and between the rounds. The rounds are ``lowbias32`` of C. Wellons (nullprogram.com/blog/2018/07/31).
    The values are those at ``first`` and after.
    """
    key, second_key = _keys(seed, step, start)
    counters = torch.arange(first // 2, (first + count + 1) // 2, dtype=torch.int32, device=device)
    x = _hashed(counters, key, second_key)
    return x.view(torch.int16)[first % 2 : first % 2 + count].to(torch.int32).bitwise_and_(_LOWER)


def bits_of_positions(count: int, seed: int, step: int, start: int, device: torch.device) -> Tensor:
    """Return the bits by which :func:`stochastic_round_` rounds ``count`` values at ``start``: (count,) int32."""
    bits = torch.empty(count, dtype=torch.int32, device=device)
    for part, chunk, first in _chunks(bits, start):
        part.copy_(random_bits(part.numel(), seed, step, chunk, device, first))
    return bits


def _chunks(flat: Tensor, start: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield parts of ``flat`` that share keys, the position where their chunk begins, and their place in the chunk."""
    offset = 0
    while offset < flat.numel():
        first = (start + offset) % _CHUNK
        part = flat[offset : offset + _CHUNK - first]
        yield part, start + offset - first, first
        offset += part.numel()


def _hashed(counters: Tensor, key: Tensor | int, second_key: Tensor | int) -> Tensor:
    # >> on int32 copies the sign; the mask makes it a logical shift
    x = counters + key
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = ((x ^ ((x >> 15) & 0x1FFFF)) + second_key) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _keys(*numbers: int) -> tuple[int, int]:
    """Return two int32 keys of the integers, by the finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    z = 0
    for number in numbers:
        z = (z + number + 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        z ^= z >> 31
    return (z & 0xFFFFFFFF) - (1 << 31), (z >> 32) - (1 << 31)
