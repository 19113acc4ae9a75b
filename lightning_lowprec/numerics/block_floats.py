"""Numbers of 8 bits that share an exponent in blocks, for the moments of an optimizer.

A block of consecutive numbers stores one exponent E, of 8 bits: that of its largest absolute value. A number is a
small float below 2**(E + 1): an exponent field, counted down from E, and a mantissa. The smallest field has subnormal
numbers.

| format | sign | exponent, mantissa | smallest number beside the largest of the block | relative step |
|---|---|---|---|---|
| ``E4M3``, any sign | yes | 4, 3; codes are float8_e4m3fn | 2**-17 | 1/8 to 1/16 |
| ``E5M3``, not negative | no | 5, 3; codes are uint8 | 2**-33 | 1/8 to 1/16 |

Adam divides by the root of its second moment, so that the second moment needs the square of the range of the first.

Numbers are rounded stochastically: to nearest, a moment that decays by 0.1 % per step would round back to itself for
ever. A positive second moment never becomes zero, because Adam would divide by zero.

Encoding what was decoded gives the same numbers. Inf and NaN make a block NaN.
"""

from dataclasses import dataclass
from math import gcd
from typing import Final

import torch
from torch import Tensor

LARGEST_BLOCK: Final = 256
"""Numbers that share an exponent, where rows are multiples of this."""
SMALLEST_BLOCK: Final = 32
NAN_EXPONENT: Final = 255
_BIAS: Final = 127  # of float32's exponents
_MANTISSA: Final = 23  # bits of float32's mantissa


@dataclass(frozen=True)
class BlockFormat:
    """A format of codes; see the table above."""

    dtype: torch.dtype
    mantissa: int
    """Bits of the mantissa."""
    top: int
    """The largest exponent field."""
    last: int
    """The largest mantissa of the largest exponent field."""
    signed: bool


E4M3: Final = BlockFormat(torch.float8_e4m3fn, 3, 15, 6, signed=True)
E5M3: Final = BlockFormat(torch.uint8, 3, 31, 7, signed=False)
BY_DTYPE: Final = {format.dtype: format for format in (E4M3, E5M3)}


def block_size(row: int) -> int:
    """Return how many numbers share an exponent in rows of ``row`` numbers: 32 to 256, or 0 if the rows do not fit."""
    size = gcd(row, LARGEST_BLOCK)
    return size if size >= SMALLEST_BLOCK else 0


def to_blocks(values: Tensor, bits: Tensor, block: int, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return codes, (N,) of ``format.dtype``, and exponents, (N / block,) uint8, of values, (N,) float32.

    ``bits``: (N,) int32, random in [0, 65536). Values of a format that is not ``signed`` must not be negative.
    """
    blocks = (values.numel() // block, block)  # not -1: a shard may be empty
    magnitude = values.abs()
    exponents = _exponents(magnitude.view(blocks).amax(1), format)
    scaled = (magnitude.view(blocks) * _powers(2 * _BIAS - exponents)[:, None]).view(-1)
    shift = _MANTISSA - format.mantissa
    normal = ((scaled.view(torch.int32) + (bits << (shift - 16))) >> shift) - ((_BIAS - format.top) << format.mantissa)
    steps = scaled * 2.0 ** (format.top - 1 + format.mantissa) + bits * 2.0**-16
    small = steps.clamp(max=2.0**format.mantissa).nan_to_num(0.0).floor().to(torch.int32)
    codes = torch.where(scaled < 2.0 ** (1 - format.top), small, normal)
    if format.signed:
        codes = codes | ((values.view(torch.int32) >> 24) & 0x80)
    else:
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    lost = (exponents == 0) | (exponents == NAN_EXPONENT)
    codes = torch.where(lost[:, None], 0, codes.view(blocks)).view(-1)
    return codes.to(torch.uint8).view(format.dtype), exponents.to(torch.uint8)


def from_blocks(codes: Tensor, exponents: Tensor, block: int, format: BlockFormat) -> Tensor:
    """Return values, (N,) float32, of codes, (N,), and exponents, (N / block,)."""
    all_bits = codes.view(torch.uint8).to(torch.int32)
    magnitude = all_bits & 0x7F if format.signed else all_bits
    field, mantissa = magnitude >> format.mantissa, magnitude & ((1 << format.mantissa) - 1)
    bits = ((field + _BIAS - format.top) << _MANTISSA) | (mantissa << (_MANTISSA - format.mantissa))
    small = mantissa.float() * 2.0 ** (1 - format.top - format.mantissa)
    values = torch.where(field > 0, bits.view(torch.float32), small)
    if format.signed:
        values = torch.where(all_bits > 0x7F, -values, values)
    shared = exponents.to(torch.int32)
    scales = torch.where(shared == NAN_EXPONENT, torch.nan, torch.where(shared == 0, 0.0, _powers(shared)))
    return (values.view(len(scales), block) * scales[:, None]).view(-1)


def _exponents(largest: Tensor, format: BlockFormat) -> Tensor:
    """Return float32's exponents of the largest values, with bias, one more where rounding could carry: int32."""
    bits, limit = largest.view(torch.int32), format.last << (_MANTISSA - format.mantissa)
    exponents = bits >> _MANTISSA
    exponents = torch.where(exponents == 0, 0, exponents + ((bits & 0x7FFFFF) > limit).to(torch.int32))
    return torch.where(exponents > 2 * _BIAS - 1, NAN_EXPONENT, exponents)


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two of exponents with bias, int32, where they are none of the special ones: float32."""
    return (exponents.clamp(1, 2 * _BIAS - 1) << _MANTISSA).view(torch.float32)
