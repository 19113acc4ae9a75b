"""The number formats of torch that tensors are scaled and cast to: limits, amax, power-of-two scale, saturating cast.

A tensor ``x`` is stored as ``codes = cast(x * scale)`` and read as ``codes * inv_scale``. The scale is the largest
power of two that keeps ``amax * scale`` within the format (MS-AMP, arXiv 2310.18313, sec. 2). Multiplying by a power of
two, or by its reciprocal, rounds nothing, so all error comes from the cast.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
LEAST_AMAX: Final = 1e-12
"""A smaller largest value is replaced by this one, as in torchao: a matrix of zeros has a finite scale."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One floating-point format of torch."""

    dtype: torch.dtype
    max: float
    """The largest finite value."""
    has_inf: bool
    """Whether infinity has a code; otherwise infinity becomes NaN."""


E4M3: Final = Format(dtype=torch.float8_e4m3fn, max=448.0, has_inf=False)
"""Weights, activations, first moments (OCP FP8, arXiv 2209.05433, table 1)."""
E5M2: Final = Format(dtype=torch.float8_e5m2, max=57344.0, has_inf=True)
"""Gradients of activations, which need more range than precision (the same table)."""
FP16: Final = Format(dtype=torch.float16, max=65504.0, has_inf=True)
"""IEEE 754 binary16: masters and second moments, with a scale."""

_LIMIT: Final = 126  # |exponent| of a scale: the scale and its reciprocal are normal float32
_BIAS: Final = 127
_MANTISSA_BITS: Final = 23
_ROW: Final = 4096
_FEW: Final = 1 << 14
_E5M2_BELOW_FP16: Final = 8  # e5m2 is the upper byte of fp16
_E4M3_BELOW_FP16: Final = 7  # without its sign e4m3 is fp16 with three bits of mantissa, and 2 ** 8 smaller
_FP16_TOP: Final = 1 << 14  # the highest bit of fp16's exponent, which only e4m3's NaN needs


def amax(x: Tensor) -> Tensor:
    """Return the largest absolute value: (...) any float -> scalar float32; NaN if ``x`` has NaN, 0 if it is empty."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    magnitude = x.abs()
    if torch.compiler.is_compiling():
        magnitude = _rows(magnitude).amax(-1)
    return magnitude.amax().float()


def _rows(x: Tensor) -> Tensor:
    """Return ``x``, not negative, as rows and zeros behind them, to be reduced by many blocks of threads.

    A compiler splits a reduction to one number only if the first tensor that it sees is large. Its code also runs for
    all later sizes, and from its cache on disk: a small first tensor would leave one block for a large one.
    """
    if x.dim() != 1:
        return x
    rows = len(x) // _ROW + 2  # never one row: the compiler would make a graph for it
    return torch.nn.functional.pad(x, (0, rows * _ROW - len(x))).view(rows, _ROW)


def largest_scale(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """Return torchao's scales, ``largest / amax``: (...) any float -> (...) float32; NaN stays NaN.

    ``power_of_2`` rounds by torchao's formula, ``2**floor(log2(scale))`` in float32: downward, except that a scale
    whose logarithm is rounded to an integer becomes the power of two just above the scale.
    """
    # in float64, so that eager and compiled code agree
    scale = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=LEAST_AMAX)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def power_of_two_scale(amax: Tensor, format: Format = E4M3, old: Tensor | None = None) -> Tensor:
    """Return ``2**floor(log2(format.max / amax))``: (...) float32 -> (...) float32, exact, in [2**-126, 2**126].

    The exponents are subtracted, and comparing the mantissas decides about 1 more: no division or logarithm rounds.
    ``old``, (...) float32, are the scales to keep where ``amax`` is 0 or not finite; None: 1.
    """
    limit_mantissa, limit_exponent = math.frexp(format.max)
    mantissa, exponent = torch.frexp(amax.float())
    floor = limit_exponent - exponent - (mantissa > limit_mantissa).to(exponent.dtype)
    scale = power_of_two(floor.clamp(-_LIMIT, _LIMIT))
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(scale) if old is None else old)


def visible_scale(amax: Tensor) -> Tensor:
    """Return :func:`power_of_two_scale` for e4m3, and NaN where ``amax`` is not finite: inf must not become 448."""
    return power_of_two_scale(amax, E4M3, old=amax.cos())  # 1 at 0, and NaN at inf and NaN, in one kernel


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent``, exact on every device: (...) int32 in [-126, 127] -> (...) float32."""
    return exponent.to(torch.int32).add(_BIAS).bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)


def encode(values: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return codes: (...) any float, a scale that broadcasts -> (...) ``dtype``; inf becomes the largest value."""
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype)


def decode(codes: Tensor) -> Tensor:
    """Return the values of codes: (...) float8 -> (...) float32, with the same strides.

    On a CPU torch 2.13 converts float8_e4m3fn value by value, 5 ns each. To write the bits of fp16 takes a seventh.
    """
    if (
        torch.compiler.is_compiling()
        or type(codes) is not Tensor
        or codes.device.type != "cpu"
        or codes.dtype not in (E4M3.dtype, E5M2.dtype)
        or codes.numel() < _FEW  # each operation takes microseconds
    ):
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == E5M2.dtype:
        return bits.bitwise_left_shift_(_E5M2_BELOW_FP16).view(torch.float16).float()
    bits.bitwise_left_shift_(_E4M3_BELOW_FP16).bitwise_and_(~_FP16_TOP)
    bits |= (bits + (1 << _E4M3_BELOW_FP16)).bitwise_and_(_FP16_TOP)  # all ones are NaN: one more is carried
    return bits.view(torch.float16).float().mul_(2.0**8)


def saturating_cast(x: Tensor, format: Format) -> Tensor:
    """Round to nearest, ties to even: (...) float32 -> (...) ``format.dtype``.

    A finite value beyond the format's largest value becomes the largest value. inf stays inf if the format has inf, and
    becomes NaN otherwise. NaN stays NaN. (A bare cast of torch 2.13 on CPU turns inf into 448 in float8_e4m3fn.)
    """
    finite = x.clamp(-format.max, format.max)  # keeps NaN
    return torch.where(x.isinf(), x if format.has_inf else torch.nan, finite).to(format.dtype)
