"""Parameters on several device meshes: with tensor parallelism some are sharded twice, the others once.

torch's multi-tensor operations take the DTensors of one mesh at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each mesh; plain ones are a group of their own."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` does, over all meshes.

    Returns:
        The norm of all gradients together, a plain scalar tensor.

    Raises:
        RuntimeError: it is not finite and ``error_if_nonfinite`` is set.
    """
    groups = by_mesh(p for p in parameters if p.grad is not None)
    norms = [_whole(get_total_norm([p.grad for p in group if p.grad is not None], norm_type)) for group in groups]
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


def _whole(tensor: Tensor) -> Tensor:
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def step_one_by_one(optimizer: Optimizer) -> bool:
    """If the optimizer's parameters lie on several meshes and it chooses by itself, take its foreach form from it."""
    if len(by_mesh(p for group in optimizer.param_groups for p in group["params"])) == 1:
        return False
    undecided = [g for g in optimizer.param_groups if g.get("foreach", False) is None and not g.get("fused")]
    for group in undecided:
        group["foreach"] = False
    return bool(undecided)
