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


@torch.no_grad()
def send_all(model: nn.Module, device: torch.device) -> None:
    """Send the weights and buffers of rank 0 to all ranks, in place, by way of the process group's ``device``."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


def fill(model: nn.Module, device: torch.device, source: Origin, values: dict[str, Any]) -> None:
    """Give a sharded model its weights: the ``values`` of rank 0, or those that its modules initialise themselves."""
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
        tensors: dict[str, Any] = {fqn: value for fqn, value in values.items() if isinstance(value, Tensor)}
        set_model_state_dict(model, tensors, options=options)
        persistent = set(model.state_dict())
        for fqn, buffer in model.named_buffers():  # those that no state dict holds, such as rotary tables
            if fqn not in persistent and not isinstance(buffer, DTensor):
                dist.broadcast(buffer, src=0)
    for module in initialised:
        module.reset_parameters()
