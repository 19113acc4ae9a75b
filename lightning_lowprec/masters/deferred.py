"""Leave gradients at the parameters until the step, and clip or unscale them by a factor that the step multiplies by.

Clipping float32 copies of all gradients reads and writes 14 bytes per parameter more, and the copies take 4 bytes of
memory per parameter. A factor costs one read of the gradients, for their norm. The price: ``parameter.grad`` shows the
gradient of the backward, not the clipped one. So gradients stay on GPUs only; on CPUs every step shows what it clips.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.masters.registry import MasterRegistry, registries, registry_of
from lightning_lowprec.numerics.parameters import grouped, is_one, mesh_of, multiply, over_ranks, together
from lightning_lowprec.private.torch import float32_norms
from lightning_lowprec.private.torch_optimizers import steps_alone

DEVICES = {"cuda"}


def defers(optimizer: Optimizer) -> bool:
    """Return whether gradients may stay at the parameters until the step: on GPUs, if none was moved before."""
    registry = registry_of(optimizer)
    if registry is None or not steps_alone(optimizer, registry.plain):
        return False
    registry.add_missing({})
    if not registry.stores or any(store.device.type not in DEVICES for store in registry.stores):
        return False
    return all(m.grad is None and (p.grad is None or not p.grad.is_sparse) for p, m in registry.pairs())


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of an optimizer that :func:`defers`; return their float32 norm before, over all ranks."""
    registry: MasterRegistry = optimizer._masters  # type: ignore[attr-defined]
    deferred = registry.deferred_grads()
    others = [p.grad for p in registry.without_master() if p.grad is not None]
    if not deferred and not others:
        return torch.tensor(0.0)
    parts = [norm * registry.factor for norm in norms(deferred, norm_type)] + norms(others, norm_type)
    total = together(parts, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    registry.fold_factor(factor, deferred)
    multiply(others, factor)
    return total


@torch.no_grad()
def unscale(optimizer: Optimizer, inv_scale: float) -> Tensor:
    """Multiply the gradients of an optimizer that :func:`defers`; return 1.0 if one was not finite, else 0.0."""
    registry: MasterRegistry = optimizer._masters  # type: ignore[attr-defined]
    grads = registry.deferred_grads()
    registry.fold_factor(inv_scale, grads)
    if not grads:
        return torch.zeros(())
    return (~together(norms(grads, math.inf), math.inf).isfinite()).float()


def multiply_waiting() -> None:
    """Before a backward: multiply gradients that wait for a step, which the new gradients must not share."""
    for registry in registries:
        if not is_one(registry.factor):
            registry.move_grads()


def norms(grads: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norms of gradients by device, mesh and placements: tensor parallelism shards over one mesh more."""
    groups = grouped(grads, lambda grad: (grad.device, mesh_of(grad), getattr(grad, "placements", None)))
    return over_ranks([torch.linalg.vector_norm(float32_norms(group, order), order) for group in groups])
