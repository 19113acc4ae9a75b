"""Device meshes: copies x shards x tensor parallel."""

from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE: Final = "replicate"
SHARD: Final = "data_parallel"
TENSOR: Final = "tensor_parallel"  # Lightning has chosen this name, and the one before


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


def data_ranks(mesh: DeviceMesh) -> dict[str, object]:
    """Return the arguments of a distributed sampler: the ranks of a tensor-parallel group read the same data."""
    copies = mesh[REPLICATE].size() if REPLICATE in (mesh.mesh_dim_names or ()) else 1
    copy = mesh.get_local_rank(REPLICATE) if copies > 1 else 0
    size = mesh[SHARD].size()
    return {"num_replicas": copies * size, "rank": copy * size + mesh.get_local_rank(SHARD)}
