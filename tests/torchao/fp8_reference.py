"""A hand-written FP8 reference in float64, from the format's definition (arXiv 2209.05433), without torchao."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """An 8-bit float: sign, `exponent_bits`, `mantissa_bits`; `largest` is the largest finite value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float

    def decode(self, code: int) -> float:
        """The value of the low 7 bits of a code."""
        exponent, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
        fraction = mantissa / 2**self.mantissa_bits
        if exponent == 0:
            return fraction * 2.0 ** (1 - self.bias)
        return (1 + fraction) * 2.0 ** (exponent - self.bias)

    def values(self) -> np.ndarray:
        """Every finite value of the codes 0 .. n, ascending: index = code."""
        values = np.array([self.decode(code) for code in range(128)])
        return values[values <= self.largest][: int(np.searchsorted(values, self.largest)) + 1]


E4M3 = Format(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0)
E5M2 = Format(exponent_bits=5, mantissa_bits=2, bias=15, largest=57344.0)


def scale(amax: np.ndarray, format: Format, power_of_two: bool) -> np.ndarray:
    """largest / amax, rounded to float32; then optionally down to a power of two. amax is at least 1e-12."""
    result = (format.largest / np.maximum(amax.astype(np.float64), 1e-12)).astype(np.float32)
    if power_of_two:
        _, exponent = np.frexp(result)  # result = m * 2**exponent, 0.5 <= m < 1
        result = np.ldexp(np.float32(1.0), exponent - 1).astype(np.float32)
    return result


def codes(x: np.ndarray, scale: np.ndarray, format: Format) -> np.ndarray:
    """The 8-bit codes of float32(x) * scale: nearest value, ties to the even code, saturating."""
    scaled = (x.astype(np.float32) * scale.astype(np.float32)).astype(np.float32).astype(np.float64)
    table = format.values()
    magnitude = np.minimum(np.abs(scaled), format.largest)
    above = np.minimum(np.searchsorted(table, magnitude, side="left"), len(table) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    nearest = np.where(to_above < to_below, above, below)
    nearest = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), nearest)
    return (nearest | np.where(np.signbit(scaled), 0x80, 0)).astype(np.uint8)


def dequantise(codes: np.ndarray, scale: np.ndarray, format: Format) -> np.ndarray:
    """The float64 values that codes stand for."""
    magnitude = format.values()[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude) / scale.astype(np.float64)
