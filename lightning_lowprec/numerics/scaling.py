"""Scaling a tensor into a small format: amax, power-of-two scale, saturating cast. Pure functions.

A tensor ``x`` is kept as ``codes = cast(x * scale)`` and read as ``codes * inv_scale``. The scale is the largest power
of two that keeps ``amax * scale`` within the format, so that multiplying by it, or by its reciprocal, rounds nothing:
all error is that of the cast (MS-AMP, arXiv 2310.18313, sec. 2; power of two: no error added by the scale).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import Format

_LIMIT: Final = 126  # |exponent| of a scale: it and its reciprocal are normal float32
_BIAS: Final = 127
_MANTISSA_BITS: Final = 23


def amax(x: Tensor) -> Tensor:
    """The largest absolute value: (...) any float -> scalar float32; NaN if there is one, 0 if ``x`` is empty."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return x.abs().amax().float()


def power_of_two_scale(amax: Tensor, format: Format, old: Tensor | None = None) -> Tensor:
    """``2**floor(log2(format.max / amax))``: (...) float32 -> (...) float32, exact, in [2**-126, 2**126].

    The exponents of the two are compared, and their mantissas decide the last bit: no division or logarithm rounds.

    Args:
        amax: (...) float32, the largest absolute values.
        format: where ``amax * scale`` must fit.
        old: (...) float32, the scales to keep where ``amax`` is 0 or not finite; None: 1.
    """
    limit_mantissa, limit_exponent = math.frexp(format.max)
    mantissa, exponent = torch.frexp(amax.float())
    floor = limit_exponent - exponent - (mantissa > limit_mantissa).to(exponent.dtype)
    scale = power_of_two(floor.clamp(-_LIMIT, _LIMIT))
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(scale) if old is None else old)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent``, exact on every device: (...) int32 in [-126, 127] -> (...) float32."""
    return exponent.to(torch.int32).add(_BIAS).bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)


def saturating_cast(x: Tensor, format: Format) -> Tensor:
    """Round to nearest, ties to even; finite values beyond the format's become its largest.

    inf stays inf where the format has one and is NaN elsewhere, NaN stays NaN: neither becomes a finite code. (A bare
    cast of torch 2.13 on CPU makes 448 of inf in float8_e4m3fn.)

    Args:
        x: (...) float32.
        format: of the result, (...).
    """
    finite = x.clamp(-format.max, format.max)  # keeps NaN
    return torch.where(x.isinf(), x if format.has_inf else torch.nan, finite).to(format.dtype)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantisation noise in dB: ``10 log10(sum reference**2 / sum (reference - approximation)**2)``.

    Equal tensors give inf. Sums are in float64.
    """
    signal = reference.double()
    noise = (signal - approximation.double()).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise else float("inf")
