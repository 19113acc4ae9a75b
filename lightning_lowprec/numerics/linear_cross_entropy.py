"""Losses and gradients of ``cross_entropy(linear(hidden, weight), target)`` without the whole matrix of logits.

Some tokens at a time, with three matrix products per token and none of them computed twice:

    logits      = hidden @ weight.T           # [M, K] @ [K, V] -> [M, V]
    gradient    = d losses / d logits         # [M, V], in the memory of the logits
    grad_hidden = gradient @ weight           # [M, V] @ [V, K] -> [M, K]
    grad_weight = gradient.T @ hidden         # [V, M] @ [M, K] -> [V, K], added up in float32

The gradients are those of the *sum* of the losses, times a ``gradient_scale``: their size does not depend on the number
of tokens, and fp16 holds them. The caller multiplies them by the rest (mean, loss scale) in float32.

Logits are rounded to the dtype of ``hidden``, as those of a Linear are; the rest of the loss is float32.

With ``p = softmax(x)`` of one row ``x`` of V logits, ``lse = log(sum(exp(x)))``, target ``t``, label smoothing ``e``:

    loss    = lse - (1 - e) * x[t] - e * mean(x)
    d/dx[v] = p[v] - (1 - e) * [v == t] - e / V

The gradient of a row is that of its own loss, so its values lie between -1 and 1 for any number of rows, and a small
format holds them with a scale that is known in advance. Rows whose target is ``ignore_index`` have loss 0 and gradient
0. On CUDA losses and gradient of some rows are one kernel.

In FP8 the three products take codes. The weight is encoded once per call. FP8 products cannot add to a matrix, so one
product of the weight's gradient takes up to ``SPAN_BYTES`` of the codes of the logits' gradient. Where one product is
enough, it returns the dtype of the weight.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Final, Unpack, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.formats import E5M2, encode
from lightning_lowprec.numerics.fp8_matrices import FastAccum, TwoLayouts, padded, product, transposed
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.numerics.one_pass import is_simulated, kernels_run, on_device, rows_in_one_pass
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.private.torch import increment_versions

DEVICES = {"cuda"}
MEMORY: Final = 1_400_000_000
"""Bytes that a copy of the weight and the logits of one chunk may take together."""
MOST_ROWS: Final = 2048
"""Tokens at a time: above this number, matrix products get no faster."""
FEWEST_ROWS: Final = 256
"""Tokens at a time: below this number, matrix products get slow."""
SPAN_BYTES: Final = 1_100_000_000
"""Bytes of codes of the gradient that are kept for one FP8 product of the weight's gradient."""
_BLOCK: Final = 8192
"""Rows of the weight's gradient that are added at a time."""
CODE_SCALE: Final = 2.0**14
"""The scale of gradients in float8_e5m2: values up to 3.5 have a code, and 2**-28 is a normal number. The average of
128k probabilities is 2**-17. float8_e4m3fn would lose those below 2**-18."""
FP16_GRADIENT_SCALE: Final = 2.0**7
"""Small gradients of logits stay above fp16's subnormal numbers, and products with weights of up to 250 stay finite."""


Terms = tuple[int, float]
"""Of the loss of a row: ``ignore_index``, whose rows have no loss; ``e``, the label smoothing."""
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Losses, (T,) float32, 0 for ignored tokens; gradients, times ``gradient_scale``, or None where none was wanted:

    hidden   (T, K) in the dtype of ``hidden``; of FP8 products in fp16 float32
    weight   (V, K) float32; of one FP8 product for a bf16 weight bf16
    bias     (V,) float32
"""


def gradient_scale(dtype: torch.dtype, *, fp8: bool) -> float:
    """Return the power of two that the gradients are multiplied by."""
    return FP16_GRADIENT_SCALE if dtype == torch.float16 and not fp8 else 1.0


def rows_at_a_time(vocabulary: int, dtype: torch.dtype, copied: int) -> int:
    """Return how many tokens to compute at a time; a copy of the weight takes ``copied`` bytes."""
    fitting = (MEMORY - copied) // (vocabulary * dtype.itemsize)
    return max(FEWEST_ROWS, min(MOST_ROWS, fitting // FEWEST_ROWS * FEWEST_ROWS))


def in_half(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factors: Tensor,
    terms: Terms,
    wanted: Sequence[bool],
    rows: int | None,
) -> Results:
    """Compute with products in the dtype of ``hidden``, (T, K), to which weight, (V, K), and bias, (V,), are cast.

    ``target``: (T,) int64. ``factors``, (T,) or () float32, multiply the gradients of hidden states, weight and bias
    that are ``wanted``. ``rows``: tokens at a time; None chooses.
    """
    dtype = hidden.dtype
    cast = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    factors = factors * gradient_scale(dtype, fp8=False)
    results = empty_results(hidden, weight, wanted, fp8=False)
    losses, of_hidden, of_weight, of_bias = results
    if rows is None:
        rows = rows_at_a_time(len(weight), dtype, 0 if cast is weight else cast.nbytes)
    for part in _parts(len(hidden), rows):
        x, t = hidden[part], target[part]
        logits = F.linear(x, cast, bias)
        if any(wanted):
            losses[part] = rows_in_one_pass(_losses_and_gradient_, logits, t, _of(factors, part), *terms)
        else:
            losses[part] = rows_in_one_pass(_losses, logits, t, *terms)
        if of_hidden is not None:
            torch.mm(logits, cast, out=of_hidden[part])
        if of_weight is not None:
            _add_product(of_weight, logits, x, first=part.start == 0)
        if of_bias is not None:
            of_bias.add_(logits.sum(0, dtype=torch.float32))
        del logits  # before the next ones are made
    return results


def in_fp8(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factors: Tensor,
    terms: Terms,
    wanted: Sequence[bool],
    rows: int | None,
    after: Tensor,
    *,
    emulate: Emulation,
    fast_accum: FastAccum,
) -> Results:
    """Compute with products of float8 codes: e4m3 for ``hidden`` and ``weight``, e5m2 for the gradient of the logits.

    K must be a multiple of 16. ``after``, () float32, multiplies the finished gradients: a mean divides by the number
    of tokens. ``emulate`` multiplies decoded codes in float32, or as a GPU. ``fast_accum``: the products that add up
    with fewer bits. The other arguments are those of :func:`in_half`.
    """
    losses, of_hidden, _, of_bias = empty_results(hidden, weight, (wanted[0], False, wanted[2]), fp8=True)
    dtype = dtype_of_grad_weight(len(hidden), weight, hidden.dtype, rows)
    coded = TwoLayouts.of(hidden)
    if (missing := len(coded.rows) - len(target)) > 0:
        target = F.pad(target, (0, missing), value=terms[0])
        factors = F.pad(factors, (0, missing)) if factors.ndim else factors
    run = _Fp8Run(hidden.dtype, coded, TwoLayouts.of(weight), len(weight), after, emulate, fast_accum)
    spread, span = _spread_and_span(weight, hidden.dtype, rows)
    of_weight = None
    for outer in _parts(len(target), span):
        codes_shape = len(run.weight.rows), outer.stop - outer.start
        columns = torch.empty(codes_shape, dtype=E5M2.dtype, device=hidden.device) if wanted[1] else None
        for part in _parts(outer.stop - outer.start, spread, outer.start):
            here = slice(part.start, min(part.stop, len(hidden)))
            count = here.stop - here.start  # without the rows of padding
            logits = run.logits(part, bias)
            if not any(wanted):
                losses[here] = rows_in_one_pass(_losses, logits, target[part], *terms)[:count]
                continue
            factors_here = _of(factors, part)
            some, codes = rows_in_one_pass(_losses_and_codes, logits, target[part], factors_here, *terms)
            losses[here] = some[:count]
            del logits
            if of_bias is not None:
                of_bias.add_(codes.to(hidden.dtype).sum(0, dtype=torch.float32) * run.of_codes)
            codes = padded(codes)
            if of_hidden is not None:
                of_hidden[here] = run.grad_hidden(codes)[:count]
            if columns is not None:
                transposed(codes, out=columns[:, part.start - outer.start : part.stop - outer.start])
            del codes
        if columns is not None:
            if outer.stop == len(target):
                del run.weight  # no product needs its codes any more
            of_weight = run.add_grad_weight(of_weight, columns, outer, dtype)
    return losses, of_hidden, None if of_weight is None else of_weight[: len(weight)], of_bias


@final
class _Fp8Run:
    """The products of one call in FP8."""

    def __init__(
        self,
        dtype: torch.dtype,
        hidden: TwoLayouts,
        weight: TwoLayouts,
        vocabulary: int,
        after: Tensor,
        emulate: Emulation,
        fast_accum: FastAccum,
    ) -> None:
        self.dtype, self.hidden, self.weight, self.vocabulary = dtype, hidden, weight, vocabulary
        self.of_codes = after / CODE_SCALE
        self._forward = functools.partial(product, emulate=emulate, fast=fast_accum != "none")
        self._backward = functools.partial(product, emulate=emulate, fast=fast_accum == "all")

    def logits(self, part: slice, bias: Tensor | None) -> Tensor:
        scales = self.hidden.inv_scale, self.weight.inv_scale
        rows, weight = self.hidden.rows[part], self.weight.rows.t()
        logits = self._forward(rows, weight, scales, self.dtype)[:, : self.vocabulary]
        return logits if bias is None else logits + bias.to(logits.dtype)

    def grad_hidden(self, codes: Tensor) -> Tensor:
        scales = self.of_codes, self.weight.inv_scale
        return self._backward(codes, self.weight.columns.t(), scales, _range_of(self.dtype))

    def add_grad_weight(self, total: Tensor | None, columns: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Return ``total``, of ``dtype``, with the gradient of the weight from some tokens added."""
        whole = len(self.hidden.rows) == part.stop - part.start
        hidden = self.hidden.columns if whole else self.hidden.columns[:, part].contiguous()
        scales = self.of_codes, self.hidden.inv_scale
        if total is None:
            return self._backward(columns, hidden.t(), scales, dtype)
        for block in _parts(len(columns), _BLOCK):
            total[block] += self._backward(columns[block], hidden.t(), scales, dtype)
        return total


def dtype_of_grad_weight(tokens: int, weight: Tensor, dtype: torch.dtype, rows: int | None) -> torch.dtype:
    """Return the dtype in which :func:`in_fp8` returns the gradient of ``weight``, for hidden states of ``dtype``."""
    one_product = tokens <= _spread_and_span(weight, dtype, rows)[1]
    return torch.bfloat16 if one_product and weight.dtype == torch.bfloat16 else torch.float32


def _spread_and_span(weight: Tensor, dtype: torch.dtype, rows: int | None) -> tuple[int, int]:
    """Return how many tokens have their logits in memory at a time, and how many one product of gradients takes."""
    vocabulary = len(weight)
    if rows is None:
        rows = rows_at_a_time(vocabulary, dtype, 0)
    spread = _aligned(rows)
    return spread, max(SPAN_BYTES // _aligned(vocabulary) // spread, 1) * spread


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _range_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype for gradients without a scale: fp16 has too small a range."""
    return torch.float32 if dtype == torch.float16 else dtype


def empty_results(
    hidden: Tensor, weight: Tensor, wanted: Sequence[bool], rows: int | None = None, *, fp8: bool
) -> Results:
    """Return memory for the results; the gradient of the bias begins with zeros."""
    of_weight = dtype_of_grad_weight(len(hidden), weight, hidden.dtype, rows) if fp8 else torch.float32
    return (
        hidden.new_empty(hidden.shape[:1], dtype=torch.float32),  # no `len`: a size may be a compiler's symbol
        torch.empty_like(hidden, dtype=_range_of(hidden.dtype) if fp8 else hidden.dtype) if wanted[0] else None,
        hidden.new_empty(weight.shape, dtype=of_weight) if wanted[1] else None,
        hidden.new_zeros(weight.shape[:1], dtype=torch.float32) if wanted[2] else None,
    )


def _parts(total: int, size: int, start: int = 0) -> Iterator[slice]:
    for begin in range(start, start + total, size):
        yield slice(begin, min(begin + size, start + total))


def _of(factors: Tensor, part: slice) -> Tensor:
    return factors[part] if factors.ndim else factors


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor, *, first: bool) -> None:
    """total += gradient.T @ hidden: (V, K) float32, [V, M] @ [M, K]; the first product overwrites ``total``."""
    if gradient.dtype == torch.float32 or not total.is_cuda:
        torch.addmm(total, gradient.t().float(), hidden.float(), beta=0 if first else 1, out=total)
    elif first:
        torch.mm(gradient.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, gradient.t(), hidden, out_dtype=torch.float32, out=total)


# ---- losses and gradients of some rows: logits (M, V) any float, target (M,) int64, factors (M,) or () float32


def _losses(logits: Tensor, target: Tensor, *terms: Unpack[Terms]) -> Tensor:
    x = logits.float()
    return _loss(x, _log_sum_exp(x), target, *terms)


def _losses_and_gradient_(logits: Tensor, target: Tensor, factors: Tensor, *terms: Unpack[Terms]) -> Tensor:
    """Return the losses; ``logits`` become their gradient, times ``factors``, which leave the losses alone."""
    losses, gradient = _both(logits, target, factors, *terms)
    logits.copy_(gradient)
    return losses


def _losses_and_codes(logits: Tensor, target: Tensor, factors: Tensor, *terms: Unpack[Terms]) -> tuple[Tensor, Tensor]:
    """Return the losses, and ``gradient * factors * CODE_SCALE``, (M, V) float8_e5m2, saturating; NaN stays."""
    losses, gradient = _both(logits, target, factors, *terms)
    return losses, encode(gradient, CODE_SCALE, E5M2.dtype)


def _both(
    logits: Tensor, target: Tensor, factors: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    x = logits.float()
    lse = _log_sum_exp(x)
    loss = _loss(x, lse, target, ignore_index, label_smoothing)
    gradient = (x - lse).exp()
    classes = torch.arange(x.shape[-1], device=x.device)
    gradient = gradient - torch.where(classes == target[:, None], 1 - label_smoothing, 0.0)
    if label_smoothing:
        gradient = gradient - label_smoothing / x.shape[-1]
    factors = torch.where(target != ignore_index, factors, 0.0)[:, None]
    return loss, torch.where(factors == 0, 0.0, gradient * factors)


def _log_sum_exp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top + (x - top).exp().sum(-1, keepdim=True).log()


def _loss(x: Tensor, lse: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    counts = target != ignore_index
    at_target = x.gather(-1, torch.where(counts, target, 0)[:, None])
    loss = lse - at_target
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - x.mean(-1, keepdim=True))
    return torch.where(counts, loss[:, 0], 0.0)


# ---- a gradient times a factor that only the device knows


def multiply_(values: Tensor, factor: Tensor) -> Tensor:
    """``values *= factor``, computed in float32 and rounded once; returns ``values``.

    On a GPU nothing is read or written if the factor, () float32, is 1: the gradient of a loss mostly begins with 1.
    ``mul_`` of torch reads and writes every value: 4.2 GB for the float32 gradient of a head of 128,256 x 4,096.
    """
    fits = values.device.type in DEVICES and not torch.compiler.is_compiling() and values.is_contiguous()
    if not fits or not values.numel() or not kernels_run():
        return values.mul_(factor)
    launch(values, factor)
    increment_versions([values])
    return values


def launch(values: Tensor, factor: Tensor) -> None:
    """Launch the kernel for contiguous values."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import kernels

    programs = -(-values.numel() // kernels.FACTOR_BLOCK.value)
    bf16 = values.dtype == torch.bfloat16
    with on_device(factor.device):
        bits = values.view(torch.int16) if bf16 else values
        kernels.multiply[(programs,)](bits, factor, values.numel(), BF16=bf16)
