"""Parameters of codes under DDP: DDP leaves them alone, and their FP8 gradients are averaged by one call per step.

DDP's buckets and its broadcast know nothing of scales, and it refuses a gradient of another dtype than the parameter's.

    prepare_for_ddp(model)                      # before DistributedDataParallel(model)
    ...
    loss.backward()                             # any number of micro-batches; no communication for these parameters
    average_scaled_gradients(model)             # every rank, once per step
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.distributed.fp8_gradients import average_
from lightning_lowprec.optim.scaled_weight import ScaledWeight, scaled_of

_BUCKET: Final = 1 << 23  # elements that are averaged at once: 32 MiB in float32 for the time of the call


def prepare_for_ddp(model: nn.Module, group: Any = None) -> None:
    """Tell DDP to ignore the parameters of codes, and give every rank those of rank 0, with scales and masters.

    Args:
        model: before ``DistributedDataParallel(model)``; at least one other parameter must be left for DDP to train.
        group: the process group; None is the default one. Its first rank is the one whose weights count.
    """
    ignored = {name for name, p in model.named_parameters() if scaled_of(p) is not None}
    ignored |= set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    tell_ddp: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    tell_ddp(model, sorted(ignored))
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for p, scaled in _scaled(model):
        for tensor in (p.detach(), scaled.scale, scaled.master, scaled.master_scale):
            if tensor is not None:
                dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)  # gloo knows no float8


@torch.no_grad()
def average_scaled_gradients(model: nn.Module, group: Any = None) -> None:
    """Average the FP8 gradients of the parameters of codes over the ranks, with one byte per element on the wire.

    As ``fp8_gradient_hook`` does it. All ranks get the same bits; inf or NaN on one rank is NaN on all. A parameter
    without a gradient on some ranks counts as zero there; without one on any rank, it stays without.

    Args:
        model: the same on every rank; wrapped in DDP or not.
        group: the process group; None is the default one.
    """
    pairs = [(p, s) for p, s in _scaled(model) if p.requires_grad and p.numel()]
    if not pairs:
        return
    present = torch.tensor([s.grad is not None for _, s in pairs], dtype=torch.uint8).to(pairs[0][0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    bucket: list[tuple[Tensor, ScaledWeight]] = []
    size = 0
    for (p, s), used in zip(pairs, present.tolist(), strict=True):
        if bucket and size + p.numel() > _BUCKET:
            _average(bucket, group)
            bucket, size = [], 0
        if used:
            bucket.append((p, s))
            size += p.numel()
    if bucket:
        _average(bucket, group)


def _average(bucket: list[tuple[Tensor, ScaledWeight]], group: Any) -> None:
    sizes = [p.numel() for p, _ in bucket]
    flat = torch.zeros(sum(sizes), device=bucket[0][0].device)
    parts = torch.split(flat, sizes)
    for (_, s), part in zip(bucket, parts, strict=True):
        if s.grad is not None and s.grad_inv_scale is not None:
            torch.mul(s.grad.flatten().float(), s.grad_inv_scale, out=part)
    average_(flat, sizes, dist.group.WORLD if group is None else group)
    for (p, s), part in zip(bucket, parts, strict=True):
        s.grad = s.grad_inv_scale = None
        s.accumulate(part.view(p.shape))  # exact: the scale was a power of two, and is none smaller now


def _scaled(model: nn.Module) -> Iterator[tuple[Tensor, ScaledWeight]]:
    for p in model.parameters():
        scaled = scaled_of(p)
        if scaled is not None:
            yield p, scaled
