"""Device meshes: copies x shards x tensor parallel, and operations on parameters that lie on several of them.

With tensor parallelism some parameters are sharded twice and the others once. torch's multi-tensor operations take the
DTensors of one mesh at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

REPLICATE: Final = "replicate"
SHARD: Final = "data_parallel"
TENSOR: Final = "tensor_parallel"
"""Names of the dimensions; Lightning has chosen the last two."""


def shards(world_size: int, replicate: int, tensor_parallel_size: int, expected: int | None = None) -> int:
    """Return the number of ranks over which one copy of the model is sharded."""
    if world_size % (replicate * tensor_parallel_size):
        raise ValueError(
            f"`replicate={replicate}` times `tensor_parallel_size={tensor_parallel_size}` does not divide the number of"
            f" processes ({world_size})."
        )
    size = world_size // (replicate * tensor_parallel_size)
    if expected not in (None, size):
        raise ValueError(
            f"`shards={expected}` with `replicate={replicate}` and `tensor_parallel_size={tensor_parallel_size}` needs"
            f" {expected * replicate * tensor_parallel_size} processes, and there are {world_size}."
        )
    return size


def make_mesh(device: torch.device, world_size: int, replicate: int, tensor_parallel_size: int) -> DeviceMesh:
    """Return a mesh ``(data_parallel, tensor_parallel)``, with ``replicate`` in front if there are copies."""
    sizes = {SHARD: shards(world_size, replicate, tensor_parallel_size), TENSOR: tensor_parallel_size}
    if replicate > 1:
        sizes = {REPLICATE: replicate, **sizes}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of ``mesh`` for ``fully_shard``: one dimension, or two if there are copies."""
    names = mesh.mesh_dim_names or ()
    if SHARD in names:
        return mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[SHARD]
    if mesh.ndim > 2:
        raise ValueError(f"a mesh with the dimensions {names} has none named {SHARD!r}.")
    return mesh  # made and named by the user, without tensor parallelism


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the part of ``mesh`` for tensor parallelism; None if that part has one rank."""
    if TENSOR not in (mesh.mesh_dim_names or ()) or mesh[TENSOR].size() == 1:
        return None
    return mesh[TENSOR]


def data_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    """Return ``num_replicas`` and ``rank`` for a distributed sampler.

    The ranks of one tensor-parallel group read the same data.
    """
    copies = mesh[REPLICATE].size() if REPLICATE in (mesh.mesh_dim_names or ()) else 1
    copy = mesh.get_local_rank(REPLICATE) if copies > 1 else 0
    size = mesh[SHARD].size()
    return {"num_replicas": copies * size, "rank": copy * size + mesh.get_local_rank(SHARD)}


# ---- tensors on several meshes


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their mesh; tensors without a mesh are one group."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients in place as ``torch.nn.utils.clip_grad_norm_`` does, over all meshes; return their norm."""
    groups = by_mesh(p for p in parameters if p.grad is not None)
    norms: list[Any] = [get_total_norm([p.grad for p in group if p.grad is not None], norm_type) for group in groups]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped."
        )
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach=False)
    return total


def disable_foreach(optimizer: Optimizer) -> bool:
    """Set ``foreach=False`` if the parameters lie on several meshes and ``foreach`` was not set; return whether."""
    if len(by_mesh(p for group in optimizer.param_groups for p in group["params"])) == 1:
        return False
    undecided = [g for g in optimizer.param_groups if g.get("foreach", False) is None and not g.get("fused")]
    for group in undecided:
        group["foreach"] = False
    return bool(undecided)
