"""MS-AMP under DDP: equal codes on every rank, and FP8 gradients that are averaged by one call per step.

DDP's buckets and broadcasts do not know scales, and DDP refuses a gradient of another dtype than its parameter. So DDP
ignores the parameters of codes.
"""

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowprec.gone import missing_attribute
from lightning_lowprec.msamp.gradient import ScaledGradient, Stage
from lightning_lowprec.msamp.weight_state import msamp_state_of
from lightning_lowprec.numerics.fp8_average import average_
from lightning_lowprec.numerics.one_pass import tensor_on
from lightning_lowprec.numerics.parameters import chunks
from lightning_lowprec.private.torch import ignore_in_ddp, train_in_ddp


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)


_EXCLUDING: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""The models whose weights of codes DDP ignores; DDP reads their names in the model that it gets."""
_BUCKET: Final = 1 << 23  # elements that are averaged at once: 32 MiB in float32 for the time of the call


def include_again(model: nn.Module, reverted: Collection[int]) -> None:
    """Let DDP train parameters again that were codes, by their ids: in ``model``, and in every model that holds it."""
    for holder in {model, *_EXCLUDING}:
        named = holder.named_parameters(remove_duplicate=False)
        train_in_ddp(holder, {name for name, p in named if id(p) in reverted})


def exclude_codes(model: nn.Module) -> set[str]:
    """Let DDP ignore the parameters of codes, and return their names."""
    coded = {name for name, p in model.named_parameters() if msamp_state_of(p) is not None}
    ignore_in_ddp(model, coded)
    _EXCLUDING.add(model)
    return coded


def broadcast_codes(model: nn.Module, group: Any = None) -> None:
    """Give every rank of ``group`` the codes and scales of its first rank."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for p in model.parameters():
        state = msamp_state_of(p)
        if state is None:
            continue
        for tensor in (state.codes, state.scale, state.e4m3, state.e4m3_scale):
            if tensor is not None:
                dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)  # gloo has no float8


@torch.no_grad()
def average_scaled_gradients(params: Iterable[Tensor], group: object) -> None:
    """Average the gradients of the parameters of codes over the ranks, with one byte per element on the wire.

    The arithmetic is that of ``fp8_gradient_hook``. A parameter that has a gradient on some ranks only counts as zero
    on the others. A gradient that is the average already, and was not added to since, stays; all ranks must agree on
    this, so the host waits for the device once. ``params``, of codes, are the same on every rank.

    Raises:
        RuntimeError: on every rank, if one rank has clipped its own gradients, for example by ``clip_grad_norm_``.
    """
    coded = [p for p in params if p.numel()]
    if not coded:
        return
    stages_here = [Stage.AVERAGED if p.grad is None else getattr(p.grad, "stage", Stage.OWN) for p in coded]
    largest = tensor_on(coded[0].device, stages_here, torch.uint8)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    stages = largest.tolist()  # the same on every rank; here the host waits
    if Stage.CLIPPED in stages:
        raise RuntimeError(
            "gradients of weights that are kept as codes (MS-AMP) were clipped before they were averaged over the"
            " ranks, by norms that differ between them. Clip with `Trainer(gradient_clip_val=...)`,"
            " `LightningModule.clip_gradients` or `fabric.clip_gradients`."
        )
    waiting = [p for p, stage in zip(coded, stages, strict=True) if stage != Stage.AVERAGED]
    for bucket in chunks(waiting, _BUCKET):
        _average(bucket, group)


def _average(bucket: list[Tensor], group: object) -> None:
    sizes = [p.numel() for p in bucket]
    flat = torch.zeros(sum(sizes), device=bucket[0].device)
    parts = torch.split(flat, sizes)
    for p, part in zip(bucket, parts, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.flatten())
    average_(flat, sizes, group)
    for p, part in zip(bucket, parts, strict=True):
        # exact: the scale of the average was a power of two, and the scale here is not smaller
        p.grad = ScaledGradient.of(part.view(p.shape), Stage.AVERAGED)


def ranks() -> int:
    """Return the number of ranks; 0 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
