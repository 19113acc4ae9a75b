"""Average gradients over the ranks of DDP; ranks send and receive one byte per element.

    amax of every parameter in the bucket        -> all_reduce(MAX): every rank has the same scales
    codes = float8_e4m3fn(gradient * scale)      -> all_to_all: rank r gets slice r of every rank
    mean  = float8_e4m3fn(sum in float32 / ranks) -> all_gather: every rank gets the same codes
    gradient = mean * inv_scale

Sums are in float32, so the error is that of two roundings for any number of ranks. A ring that sums in FP8 rounds at
every hop (17.6 dB at 64 ranks, against 28.5 dB here, simulated). A mean is never larger than the largest gradient, so
one scale is used before and after. Every parameter has its own: in one bucket, gradients of a norm and of an embedding
may differ by orders of magnitude.
"""
# no `from __future__ import annotations`: DDP refuses a hook whose annotations are strings

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3, power_of_two_scale, saturating_cast
from lightning_lowprec.numerics.one_pass import tensor_on
from lightning_lowprec.private.torch import largest_absolute_values

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def fp8_gradient_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average one bucket; use as ``ddp.register_comm_hook(None, fp8_gradient_hook)``.

    The bucket is (N,) float32, bfloat16 or float16. Every rank sends a quarter of an all-reduce in float32, and 4 to 8
    bytes per parameter for its amax. All ranks get the same bits. If a gradient has inf or NaN on any rank, all of it
    is NaN on every rank, so that a loss scaler sees it. On CUDA the hook runs beside the rest of the backward.
    ``state`` is the process group of ``ddp`` if it was given one, else None.

    Raises:
        TypeError: the gradients are sparse or of another dtype.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse or buffer.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        kind = "sparse " if buffer.is_sparse else ""
        raise TypeError(
            f"fp8_gradient_hook got {kind}gradients of {buffer.dtype}, shape {tuple(buffer.shape)}; expected dense"
            " float32, bfloat16 or float16. Use `sparse=False`, or list such parameters in"
            " `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` and reduce them yourself."
        )
    sizes = tuple(p.numel() for p in bucket.parameters() if p.numel())
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    with _beside(buffer.device):
        average_(buffer, sizes, dist.group.WORLD if state is None else state)
        future.set_result(buffer)
    return future


@torch.no_grad()
def average_(flat: Tensor, sizes: Sequence[int], group: Any) -> None:
    """Average ``flat``, (N,) any float, over the ranks of ``group`` in place; every run of ``sizes`` has its scale."""
    amaxes = run_amaxes(flat, sizes)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    ranks = dist.get_world_size(group)
    padded = torch.zeros(ranks, -(-flat.numel() // ranks), dtype=torch.uint8, device=flat.device)
    padded.view(-1)[: flat.numel()] = encode_runs(flat, sizes, amaxes)
    slices = torch.empty_like(padded)  # slices[r]: the values of rank r for this rank's slice
    dist.all_to_all_single(slices, padded, group=group)
    _all_gather(padded.view(-1), mean(slices), group=group)
    flat.copy_(decode_runs(padded.view(-1)[: flat.numel()], sizes, amaxes, flat.dtype))


def run_amaxes(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the largest absolute value of each run: (N,) any float, N = sum(sizes) -> (len(sizes),) float32.

    NaN becomes inf: a maximum over ranks keeps inf on every backend, but not NaN.
    """
    amaxes = largest_absolute_values(torch.split(flat, list(sizes))).float()
    return torch.where(amaxes.isfinite(), amaxes, torch.inf)


def encode_runs(flat: Tensor, sizes: Sequence[int], amaxes: Tensor) -> Tensor:
    """Return float8_e4m3fn codes: (N,) any float, (runs,) float32 -> (N,) uint8; NaN where the amax is not finite."""
    return saturating_cast(_scales(amaxes, sizes).mul_(flat), E4M3).view(torch.uint8)


def mean(codes: Tensor) -> Tensor:
    """Return the mean over ranks, summed in float32: (ranks, n) uint8 -> (n,) uint8, in the scale of the codes."""
    return saturating_cast(codes.view(E4M3.dtype).float().sum(0).div_(codes.shape[0]), E4M3).view(torch.uint8)


def decode_runs(codes: Tensor, sizes: Sequence[int], amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes: (N,) uint8, (runs,) float32 -> (N,) float32, finite in ``dtype`` unless NaN.

    Rounding to FP8 may lift the largest value of ``dtype`` to the next power of two, which ``dtype`` does not have.
    """
    largest = torch.finfo(dtype).max
    return codes.view(E4M3.dtype).float().mul_(_scales(amaxes, sizes).reciprocal_()).clamp_(-largest, largest)


def _scales(amaxes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return one scale per element: (N,) float32."""
    scales = torch.where(amaxes.isfinite(), power_of_two_scale(amaxes, E4M3), torch.nan)
    return scales.repeat_interleave(_counts(tuple(sizes), amaxes.device), output_size=sum(sizes))


@functools.lru_cache(maxsize=1024)
def _counts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return tensor_on(device, sizes, torch.int64)


@functools.lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA, let a separate stream wait for the current one, and return the context that runs on it."""
    if device.type != "cuda":
        return nullcontext()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
