"""Parameters of codes under DDP: DDP leaves them alone, and their FP8 gradients are averaged by one call per step.

DDP's buckets and its broadcast know nothing of scales, and it refuses a gradient of another dtype than the parameter's.

    prepare_for_ddp(model)                      # before DistributedDataParallel(model)
    ...
    loss.backward()                             # any number of micro-batches; no communication for these parameters
    average_scaled_gradients(model.parameters())     # every rank, once per step
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.numerics.fp8_average import average_

_CLIPPED: Final = 2
_BUCKET: Final = 1 << 23  # elements that are averaged at once: 32 MiB in float32 for the time of the call


def prepare_for_ddp(model: nn.Module, group: Any = None) -> None:
    """Tell DDP to ignore the parameters of codes, and give every rank those of rank 0, with scales and masters.

    Args:
        model: before ``DistributedDataParallel(model)``; at least one other parameter must be left for DDP to train.
        group: the process group; None is the default one. Its first rank is the one whose weights count.
    """
    exclude_from_ddp(model)
    broadcast_codes(model, group)


def exclude_from_ddp(model: nn.Module) -> None:
    """Tell DDP to ignore the parameters of codes, without communication."""
    ignored = {name for name, p in model.named_parameters() if msamp_state_of(p) is not None}
    ignored |= set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    tell_ddp: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    tell_ddp(model, sorted(ignored))


def broadcast_codes(model: nn.Module, group: Any = None) -> None:
    """Give every rank of ``group`` the parameters of codes of its first rank, with scales and masters."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for p in model.parameters():
        scaled = msamp_state_of(p)
        if scaled is None:
            continue
        for tensor in (p.detach(), scaled.scale, scaled.master, scaled.master_scale):
            if tensor is not None:
                dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)  # gloo knows no float8
        scaled.note_write()


@torch.no_grad()
def average_scaled_gradients(params: Iterable[Tensor], group: Any = None) -> None:
    """Average the gradients of the parameters of codes over the ranks, with one byte per element on the wire.

    As ``fp8_gradient_hook`` does it. All ranks get the same bits; inf or NaN on one rank is NaN on all. A parameter
    without a gradient on some ranks counts as zero there; without one on any rank, it stays without. What is averaged
    already, and has not been added to since, is left alone.

    Args:
        params: the same on every rank; others than those of codes are left to DDP.
        group: the process group; None is the default one.

    Raises:
        RuntimeError: on every rank, if one has clipped its own gradients, as ``clip_grad_norm_`` does.
    """
    coded = [p for p in params if msamp_state_of(p) is not None and p.requires_grad and p.numel()]
    if not coded:
        return
    waiting = torch.tensor([_waits(p.grad) for p in coded], dtype=torch.uint8).to(coded[0].device)
    dist.all_reduce(waiting, op=dist.ReduceOp.MAX, group=group)
    flags = waiting.tolist()
    if _CLIPPED in flags:
        raise RuntimeError(
            "gradients of weights that are kept as codes (MS-AMP) were clipped before they were averaged over the"
            " ranks, by norms that differ between them. Clip with `Trainer(gradient_clip_val=...)`,"
            " `LightningModule.clip_gradients` or `fabric.clip_gradients`; without Lightning, after"
            " `average_scaled_gradients`."
        )
    bucket: list[Tensor] = []
    size = 0
    for p, waits in zip(coded, flags, strict=True):
        if bucket and size + p.numel() > _BUCKET:
            _average(bucket, group)
            bucket, size = [], 0
        if waits:
            bucket.append(p)
            size += p.numel()
    if bucket:
        _average(bucket, group)


def _waits(grad: Tensor | None) -> int:
    if grad is None or getattr(grad, "averaged", False):
        return 0
    return _CLIPPED if getattr(grad, "clipped", False) else 1


def _average(bucket: list[Tensor], group: Any) -> None:
    sizes = [p.numel() for p in bucket]
    flat = torch.zeros(sum(sizes), device=bucket[0].device)
    parts = torch.split(flat, sizes)
    for p, part in zip(bucket, parts, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.flatten())
    average_(flat, sizes, dist.group.WORLD if group is None else group)
    for p, part in zip(bucket, parts, strict=True):
        # exact: the scale was a power of two, and is none smaller now
        gradient = ScaledGradient.of(part.view(p.shape))
        gradient.averaged = True
        p.grad = gradient
