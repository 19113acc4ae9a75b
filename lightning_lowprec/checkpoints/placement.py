"""Place whole tensors, which a single process has, as the shards of this rank, and gather them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_lowprec.private.torch import local_tensor, with_local_tensor

_SENT_AS: Final = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16}
"""By dtype that gloo does not gather: the dtype as which its bits are gathered."""


def placements_like(shape: Sequence[int], like: DTensor) -> list[Placement]:
    """Return how to shard a tensor of optimizer state whose parameter is ``like``.

    The tensor is sharded as the parameter is, in the dimensions that both have with the same size. Adafactor's row
    factors (out, 1) are sharded as the rows of the weight are; its column factors (1, in) are whole on every rank.
    """
    return [
        Replicate() if isinstance(p, Shard) and shape[p.dim : p.dim + 1] != like.shape[p.dim : p.dim + 1] else p
        for p in like.placements
    ]


def is_placed_like(shape: Sequence[int], like: Tensor) -> bool:
    """Return whether state of this shape is a DTensor if its parameter ``like`` is one; counters are not."""
    return isinstance(like, DTensor) and len(shape) > 0 and len(shape) == like.ndim


@torch.no_grad()
def place(whole: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return this rank's part of ``whole``, placed as ``like`` is, in new memory and in the dtype of ``whole``."""
    if not isinstance(like, DTensor):
        return whole.detach().to(like.device, copy=True)
    if whole.dtype in _SENT_AS:
        return _viewed(place(whole.view(_SENT_AS[whole.dtype]), like, placements), whole.dtype)
    on_device = whole.detach().to(like.device_mesh.device_type)
    placements = placements or placements_like(whole.shape, like)
    placed = distribute_tensor(on_device, like.device_mesh, placements, src_data_rank=None)
    return placed.to(like.device).clone()


def empty(
    shape: Sequence[int], dtype: torch.dtype, like: Tensor, placements: Sequence[Placement] | None = None
) -> Tensor:
    """Return a tensor to be filled: a DTensor if there are placements for it, else a whole tensor on every rank."""
    if placements is None and is_placed_like(shape, like) and isinstance(like, DTensor):
        placements = placements_like(shape, like)
    if not placements or not isinstance(like, DTensor):
        return torch.empty(tuple(shape), dtype=dtype)
    made = torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)
    return made.to(like.device)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole on the CPU, by a collective if it is sharded."""
    if tensor.dtype in _SENT_AS and isinstance(tensor, DTensor):
        return whole(_viewed(tensor, _SENT_AS[tensor.dtype])).view(tensor.dtype)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a tensor as another dtype of the same size."""
    if not isinstance(tensor, DTensor):
        return tensor.view(dtype)
    return with_local_tensor(local_tensor(tensor).view(dtype), tensor)
