"""Give a sharded model its weights, which every rank has, only rank 0 has, or no rank has (meta device)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

Origin = Literal["every rank", "rank 0", "nowhere"]


def origin(model: nn.Module) -> Origin:
    """Return which ranks have the weights; the answer is the same on all ranks."""
    tensors = [*model.parameters(), *model.buffers()]
    on_meta = sum(t.is_meta for t in tensors)
    own = "meta" if tensors and on_meta == len(tensors) else "mixed" if on_meta else "real"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if set(everyone) == {"real"}:
        return "every rank"
    if everyone[0] == "real" and set(everyone[1:]) == {"meta"}:
        return "rank 0"
    if set(everyone) == {"meta"}:
        return "nowhere"
    raise RuntimeError(
        f"{type(model).__name__} has {on_meta} of {len(tensors)} parameters and buffers on the meta device here, and"
        f" the ranks have: {', '.join(everyone)}. Build it on meta everywhere, on a real device everywhere, or on a"
        " real device on rank 0 and on meta on all others."
    )


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an unsharded model's state dict, to send them to the other ranks later."""
    return {fqn: tensor.detach() for fqn, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


@torch.no_grad()
def send_all(model: nn.Module, device: torch.device) -> None:
    """Send the weights and buffers of rank 0 to all ranks, in place, by way of the process group's ``device``."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


def fill(model: nn.Module, device: torch.device, source: Origin, values: dict[str, Tensor] | None) -> None:
    """Give a sharded model its weights.

    Args:
        model: sharded.
        device: the device for parameters that are on meta (CPU for offloaded ones).
        source: the result of :func:`origin`.
        values: the result of :func:`full_values`, on rank 0 if only rank 0 has the weights.
    """
    if source == "every rank":
        return
    own = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in model.modules()}
    initialised: list[Any] = [m for m, tensors in own.items() if tensors and source == "nowhere"]
    unable = sorted({type(m).__name__ for m in initialised if not hasattr(m, "reset_parameters")})
    if unable:
        raise RuntimeError(
            f"{type(model).__name__} is on the meta device, and {', '.join(unable)} have parameters or buffers but no"
            " `reset_parameters()` to initialise them. Give them one, or load the weights on rank 0 (on meta on all"
            " others), from where they are sent."
        )
    if any(tensor.is_meta for tensors in own.values() for tensor in tensors):
        model.to_empty(device=device)
    if source == "rank 0":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
        set_model_state_dict(model, dict(values or {}), options=options)
        _send_buffers(model)
    for module in initialised:
        module.reset_parameters()


@torch.no_grad()
def _send_buffers(model: nn.Module) -> None:
    """Send the buffers of rank 0 that no state dict holds, such as rotary tables."""
    persistent = set(model.state_dict())
    for fqn, buffer in model.named_buffers():
        if fqn not in persistent and not isinstance(buffer, DTensor):
            dist.broadcast(buffer, src=0)


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point buffers in place."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
