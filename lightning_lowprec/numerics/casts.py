"""Measure what a cast to float8 does to a tensor: amax, underflow, scale. Nothing waits for the device.

A value ``x`` becomes the code ``round(clamp(x * scale))``. The code is 0 if ``|x * scale|`` is at most half of the
smallest number of the format (OCP FP8, arXiv 2209.05433, table 1; a tie rounds to even, that is, to 0).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.one_pass import compiled_on_cuda

FIELDS: Final = ("amax", "scale", "values", "codes")
"""The numbers of :func:`measure`: largest absolute value, smallest scale, and counts of sampled elements that are not
0, and whose code is not 0."""

UNKNOWN: Final = -1.0
"""Stands for the scale of a tensor whose cast is not known."""
HIGH: Final = "runs in high precision"
EVALUATES: Final = "evaluation runs in high precision"


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How one tensor of a product is rounded to float8."""

    dtype: torch.dtype
    """``torch.float8_e4m3fn`` or ``torch.float8_e5m2``."""
    scale_of: Callable[[Tensor], Tensor]
    """Returns the scale, float32, of a largest absolute value: () -> (), or (M, 1) -> (M, 1)."""
    by_row: bool = False
    """Whether every row of the tensor has a scale, or the tensor has one."""


@dataclass(frozen=True, kw_only=True)
class LayerNumerics:
    """How a layer rounds the three tensors of its products; a string is the reason why a cast is not known."""

    input: Cast | str
    weight: Cast | str
    gradient: Cast | str
    """Of the layer's output, for the gradient of the input."""
    values: Tensor | None
    """The weight in high precision, (N, K); None: FSDP2 has gathered codes, and the shards have the values."""


def sampled(x: Tensor, every: int, offset: int) -> Tensor:
    """Return every ``every``-th row of ``x`` from a row that ``offset`` chooses: (*, K) -> (m, K), m >= 1, a view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[offset % min(every, len(rows)) :: every]


def measure(x: Tensor, rows: Tensor, cast: Cast | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers of ``FIELDS``: (4,) float32. Call without gradients and without autocast.

    ``rows``, (m, K), are the sampled rows of ``x``, (*, K), and ``dtype`` is the one in which the cast reads them. If
    the cast is not known (None), only the largest value is measured.
    """
    amax = torch.linalg.vector_norm(x, ord=math.inf).to(dtype)
    if cast is None:
        return torch.nn.functional.pad(amax.float().view(1), (0, len(FIELDS) - 1), value=UNKNOWN)
    largest = torch.linalg.vector_norm(rows, ord=math.inf, dim=-1, keepdim=True) if cast.by_row else amax
    info = torch.finfo(cast.dtype)
    rounds_to_zero = info.smallest_normal * info.eps / 2  # the largest number that does
    return _numbers(rows, amax, cast.scale_of(largest), rounds_to_zero)


@compiled_on_cuda
def _numbers(rows: Tensor, amax: Tensor, scale: Tensor, zero: float) -> Tensor:
    counts = (rows != 0).sum(), ((rows.float() * scale).abs() > zero).sum()
    return torch.stack([amax.float(), scale.amin(), *(count.float() for count in counts)])


def output_error(output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the norms of an exact product and of the error of ``output``, the layer's result: (2,) float32."""
    product = input.to(output.dtype) @ weight.to(output.dtype).t()  # [m, K] @ [K, n] -> [m, n]
    return _norms(product, output, None if bias is None else bias.to(output.dtype))


@compiled_on_cuda
def _norms(product: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    error = output.float() - product
    if bias is not None:
        error = error - bias
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in (product, error)])
