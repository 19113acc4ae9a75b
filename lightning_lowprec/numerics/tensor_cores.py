"""Sums of float8 products as the tensor cores of a named GPU add them up, bit for bit, on any device.

A tensor core does not add in float32. For each output it takes a block of products, and the sum so far, and

    1. finds their largest exponent (of a product: the exponents of its two codes, added up),
    2. cuts off what is more than ``places`` binary places below the largest exponent, toward zero,
    3. adds the rest up exactly,
    4. cuts the sum to ``kept`` binary places behind its first.

So a product that is much smaller than the sum loses bits, or all of its value, always toward zero. Without *fast
accumulation* Hopper and Ada begin a new sum every 128 products, and add the finished sums up in float32.

Sources. Blocks, places and order: MMA-Sim (arXiv 2511.10909, ``mmasim`` 2.1.1), whose authors compared it with these
GPUs. A new sum every 128 products: ``mmaemu`` 0.1.0, by recorded calls of cuBLASLt on an H100 PCIe and an RTX 4060.
Fast accumulation has an effect on Ada and Hopper only: cuBLASLt, CUBLASLT_MATMUL_DESC_FAST_ACCUM. Not modelled: that
cuBLASLt may split K where outputs are few.
"""

import functools
import math
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.formats import decode, power_of_two
from lightning_lowprec.numerics.kernel_operands import check_operands

TensorCores = Literal["hopper", "ada", "blackwell"]
Emulation = bool | TensorCores
"""False: kernels multiply; True: decoded codes are multiplied in float32, in `products/`; a name: this GPU's sums."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The arithmetic of one GPU's products of float8 codes."""

    title: str
    architecture: str
    """The key in :mod:`~lightning_lowprec.runs_where`."""
    block: int
    """Products that are added to the sum at once."""
    places: int
    """Binary places below the largest exponent that a summand keeps."""
    kept: int
    """Binary places that the sum keeps."""
    promoted: int = 0
    """Products per sum without fast accumulation; these sums are added up in float32. 0: all products are one sum."""


UNITS: Final[dict[TensorCores, Unit]] = {
    "hopper": Unit(title="NVIDIA Hopper", architecture="sm_90", block=32, places=13, kept=13, promoted=128),
    "ada": Unit(title="NVIDIA Ada", architecture="sm_89", block=16, places=13, kept=13, promoted=128),
    "blackwell": Unit(title="NVIDIA Blackwell", architecture="sm_100", block=32, places=25, kept=23),
}
MX_BLOCK: Final = 32
"""Codes that share a scale in MXFP8; Blackwell adds up as many at once."""
_MX_BIAS: Final = 127
_MX_NAN: Final = 255
_NAN: Final = 0x7FFFFFFF  # the bits of every NaN that a tensor core returns
_OF_ZERO: Final = -133  # the exponent that a zero counts with
_ABSENT: Final = -1000  # below every exponent
_TILE: Final = 1 << 18  # products at once: a CPU's caches hold them


def scaled_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    on: str,
) -> Tensor:
    """Stand in for ``private.torch.scaled_product`` on a named GPU, with the same arguments.

    Two single reciprocals are multiplied with each other first; with a reciprocal per row, that of the column comes
    first. The sums are float32 until they are rounded to ``dtype``.
    """
    check_operands(a, b)
    sums: Tensor = accumulate(a, b.t(), on, fast)
    if inverse_a.ndim or inverse_b.ndim:
        return (sums * inverse_b * inverse_a).to(dtype)
    return (sums * (inverse_a * inverse_b)).to(dtype)


@torch.library.custom_op("lightning_lowprec::accumulate", mutates_args=())
def accumulate(
    a: Tensor, b: Tensor, on: str, fast: bool, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    """Return the products of codes [M, K] and [N, K], summed along K as on a named GPU: [M, N] float32, not scaled.

    ``scale_a``, [M, K / 32], and ``scale_b``, [N, K / 32], float8_e8m0fnu, are a part of the sums: MXFP8 on Blackwell,
    of e4m3 codes. A sum with NaN, with inf times 0, or with both infinities is the NaN of all ones.
    """
    unit = UNITS[on]  # type: ignore[index]
    sums = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    columns = max(1, min(len(b), 1024))
    rows = max(1, _TILE // (columns * unit.block))
    for n in range(0, len(b), columns):
        right = _Factor(b[n : n + columns], None if scale_b is None else scale_b[n : n + columns], unit)
        for m in range(0, len(a), rows):
            left = _Factor(a[m : m + rows], None if scale_a is None else scale_a[m : m + rows], unit)
            sums[m : m + rows, n : n + columns] = _sums(left, right, unit, promoted=0 if fast else unit.promoted)
    with torch.autocast(a.device.type, enabled=False):
        by_ieee = _with_nan(a, scale_a) @ _with_nan(b, scale_b).t()
    sums = torch.where(by_ieee.isfinite(), sums, sums + by_ieee)
    return sums.view(torch.int32).masked_fill_(sums.isnan(), _NAN).view(torch.float32)


@accumulate.register_fake
def _(
    a: Tensor, b: Tensor, on: str, fast: bool, scale_a: Tensor | None = None, scale_b: Tensor | None = None
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)


@final
class _Factor:
    """Codes [M, K] by block: values and exponents, (K, M), and exponents of scales, (K / 32, M) or None."""

    def __init__(self, codes: Tensor, scale: Tensor | None, unit: Unit) -> None:
        values, exponents = _table(codes.dtype, codes.device)
        bits = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % unit.block)).t().int()
        self.values, self.exponents = values[bits], exponents[bits]
        self.shift = None if scale is None else scale.view(torch.uint8).t().int() - _MX_BIAS


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values and the exponents of the codes 0 to 255: (256,) float32 and int16; 0 if not finite."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()
    values = torch.where(values.isfinite(), values, 0)
    least = math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1  # subnormal numbers have the same exponent
    exponents = (torch.frexp(values)[1] - 1).clamp(min=least)
    return values, torch.where(values == 0, _ABSENT, exponents).to(torch.int16)


def _with_nan(codes: Tensor, scale: Tensor | None) -> Tensor:
    """Return decoded codes, NaN where their scale is NaN."""
    if scale is None:
        return decode(codes)
    is_nan = (scale.view(torch.uint8) == _MX_NAN).repeat_interleave(MX_BLOCK, dim=1)
    return torch.where(is_nan, torch.nan, decode(codes))


def _sums(a: _Factor, b: _Factor, unit: Unit, *, promoted: int) -> Tensor:
    """Return the sums of finite products: (M, N) float32."""
    total = sums = torch.zeros(a.values.shape[1], b.values.shape[1], device=a.values.device)
    shift = torch.zeros_like(sums, dtype=torch.int32)
    for number, start in enumerate(range(0, len(a.values), unit.block), 1):
        part = slice(start, start + unit.block)
        products = a.values[part, :, None] * b.values[part, None, :]
        exponents = a.exponents[part, :, None] + b.exponents[part, None, :]
        if a.shift is not None and b.shift is not None:
            shift = a.shift[number - 1, :, None] + b.shift[number - 1, None, :]
        sums = _add(sums, products, exponents, shift, unit)
        if promoted and number * unit.block % promoted == 0:
            total, sums = total + sums, torch.zeros_like(sums)
    return total + sums if promoted else sums


def _add(sums: Tensor, products: Tensor, exponents: Tensor, shift: Tensor, unit: Unit) -> Tensor:
    """Add a block: (M, N) float32, (block, M, N) float32 and int16, exponents of scales (M, N) -> (M, N) float32."""
    of_sums = torch.where(sums == 0, _OF_ZERO, _exponent(sums))
    top = torch.maximum(exponents.amax(0) + shift, of_sums).clamp_(min=_OF_ZERO)
    total = _cut_and_added(products, top - shift, unit) + (sums.double() * _power(unit.places - top)).trunc_()
    total *= _power(top - unit.places)
    normal = (total.view(torch.int64) & -(1 << (52 - unit.kept))).view(torch.float64)
    subnormal = (total * 2.0**149).trunc_() * 2.0**-149
    return torch.where(total.abs() < 2.0**-126, subnormal, normal).float() + 0.0  # -0 becomes 0


def _cut_and_added(products: Tensor, top: Tensor, unit: Unit) -> Tensor:
    """Return the sum of products in units of ``2 ** (top - places)``, each cut to an integer: (M, N) float64."""
    integers = (products * power_of_two(unit.places - top.clamp(-60, 100))).int()  # toward zero; below 2 ** 28
    return integers.sum(0, dtype=torch.int32 if unit.places == 13 else torch.int64).double()


def _exponent(x: Tensor) -> Tensor:
    """Return floor(log2(abs(x))): (...) float32 -> (...) int32; -126 for 0 and subnormal numbers."""
    return x.view(torch.int32).bitwise_right_shift(23).bitwise_and(255).sub_(127).clamp_(min=-126)


def _power(exponent: Tensor) -> Tensor:
    """Return ``2 ** exponent``, exact on every device: (...) int32 -> (...) float64."""
    return (exponent.to(torch.int64) + 1023).bitwise_left_shift(52).view(torch.float64)
