"""The parameters of an optimizer, and lists of parameters that are handled at once, on one or several device meshes.

With tensor parallelism some parameters are sharded twice and the others once; with expert parallelism only the experts
are DTensors. torch's multi-tensor operations take the DTensors of one mesh at a time.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_lowprec.messages import not_finite
from lightning_lowprec.private.torch import local_tensor, multiply_all_

T = TypeVar("T")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def aligned(elements: int) -> int:
    """Return how many elements of a flat buffer a tensor takes, so that each begins at a multiple of 16 bytes."""
    return -(-elements // 8) * 8


def chunks(parameters: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the parameters in their order, in lists of at most ``limit`` elements, or of one larger parameter."""
    chunk: list[Tensor] = []
    room = limit
    for p in parameters:
        if chunk and p.numel() > room:
            yield chunk
            chunk, room = [], limit
        chunk.append(p)
        room -= p.numel()
    if chunk:
        yield chunk


def on_several_meshes(tensors: Iterable[Tensor]) -> bool:
    """Return whether there are DTensors of several meshes, or DTensors and other tensors."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return len(set(map(mesh_of, tensors))) > 1


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Return lists of the items that share a key, in the order in which the keys come."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def mesh_of(tensor: Tensor) -> object:
    """Return the device mesh of a DTensor, or None."""
    return getattr(tensor, "device_mesh", None)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients in place as ``torch.nn.utils.clip_grad_norm_`` does, over all meshes; return their norm."""
    groups = grouped((p for p in parameters if p.grad is not None), mesh_of)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None], norm_type) for group in groups]
    if not norms:
        return torch.tensor(0.0)
    total = together(over_ranks(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise not_finite(norm_type)
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach=False)
    return total


def disable_foreach(optimizer: Optimizer) -> bool:
    """Set ``foreach=False`` if the parameters lie on several meshes and ``foreach`` was not set; return whether."""
    if not on_several_meshes(parameters_of(optimizer)):
        return False
    undecided = [g for g in optimizer.param_groups if g.get("foreach", False) is None and not g.get("fused")]
    for group in undecided:
        group["foreach"] = False
    return bool(undecided)


def over_ranks(norms: Iterable[Tensor]) -> list[Tensor]:
    """Return norms as plain tensors, by a collective per DTensor."""
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]


def together(norms: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of all elements whose norms are given, on the device of the first one."""
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
    return total


@torch.no_grad()
def multiply(grads: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place, of DTensors the shards; ``factor`` may be a scalar on another device."""
    if is_one(factor):
        return
    for members in grouped(map(local_tensor, grads), lambda grad: grad.device):
        here = factor.to(members[0].device) if isinstance(factor, Tensor) else factor
        multiply_all_([grad for grad in members if not grad.is_sparse], here)
        for grad in members:
            if grad.is_sparse:
                grad.mul_(here)


def is_one(factor: float | Tensor) -> bool:
    """Return whether nothing needs to be multiplied; the value of a tensor is not read: that waits for the GPU."""
    return not isinstance(factor, Tensor) and factor == 1.0


# ---- objects that the user owns, held weakly


@final
class WeakList(Generic[T]):
    """Objects that somebody else keeps alive; copies and pickles of the list are empty."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(value) for value in values]

    def add(self, value: T) -> None:
        """Put ``value`` at the end."""
        self._references = [weakref.ref(other) for other in (*self, value)]

    def __iter__(self) -> Iterator[T]:
        return iter([value for value in (reference() for reference in self._references) if value is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reduce__(self) -> "tuple[type[WeakList[T]], tuple[()]]":
        return type(self), ()


@final
class WeakNumbers(weakref.WeakKeyDictionary[T, int]):
    """A number for each object that somebody else keeps alive; a pickle of it is empty."""

    def __reduce__(self) -> "tuple[type[WeakNumbers[T]], tuple[()]]":
        return type(self), ()
