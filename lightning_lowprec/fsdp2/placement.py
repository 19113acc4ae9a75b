"""Between whole tensors, as any single process has them, and the shards of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


def placements_like(shape: Sequence[int], like: DTensor) -> list[Placement]:
    """How a tensor of optimizer state is sharded whose parameter is ``like``.

    As the parameter, in the dimensions that it has in common with it: Adafactor's row factors (out, 1) are sharded as
    the rows of the weight, its column factors (1, in) are on every rank.
    """
    return [
        placement
        if not isinstance(placement, Shard)
        or (placement.dim < len(shape) and shape[placement.dim] == like.shape[placement.dim])
        else Replicate()
        for placement in like.placements
    ]


def is_placed_like(shape: Sequence[int], like: Tensor) -> bool:
    """Whether state of this shape is a DTensor if its parameter is one; counters are not."""
    return isinstance(like, DTensor) and len(shape) > 0 and len(shape) == like.ndim


@torch.no_grad()
def place(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``whole``, as ``like`` is placed; in memory of its own, in the dtype of ``whole``."""
    if not isinstance(like, DTensor):
        return whole.detach().to(like.device, copy=True)
    on_device = whole.detach().to(like.device_mesh.device_type)
    placed = distribute_tensor(on_device, like.device_mesh, placements_like(whole.shape, like), src_data_rank=None).to(
        like.device
    )
    return placed.clone()


def empty(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor to be filled: a DTensor as ``like`` is placed if it :func:`is_placed_like` it, else whole on every rank."""
    if not is_placed_like(shape, like):
        return torch.empty(tuple(shape), dtype=dtype)
    assert isinstance(like, DTensor)
    return torch.distributed.tensor.empty(
        *shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements_like(shape, like)
    ).to(like.device)


@torch.no_grad()
def whole(value: Any) -> Any:
    """The whole tensor on the CPU, by a collective if it is sharded; anything else as it is."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) else value
