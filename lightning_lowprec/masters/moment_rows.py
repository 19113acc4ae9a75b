"""The moments of a parameter as the one-pass kernel gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.masters.block_moments import CODES, EXPONENTS, BlockMoments, block_of, zeros
from lightning_lowprec.masters.registry import MasterRegistry
from lightning_lowprec.masters.rules import Rule
from lightning_lowprec.masters.stores import Store
from lightning_lowprec.numerics.flat import local

KINDS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The kernel's words for dtypes."""


@final
@dataclass(frozen=True)
class MomentRows:
    """The moments of one parameter."""

    kind: str
    """The dtype, or the kind of codes."""
    tensors: tuple[Tensor, ...]
    """One or two, or none, of the parameter's shape."""
    exponents: tuple[Tensor, ...] = ()
    """As many, if the tensors are codes."""
    group: int = 1
    """Elements that share an exponent."""


def moments_of(
    rule: Rule, registry: MasterRegistry, optimizer: Optimizer, store: Store, param: Tensor
) -> MomentRows | None:
    """Return the moments, or None if the kernel cannot step them.

    Coded state that does not exist is made: nothing else would be float32 for a step. Other state is made by torch.
    """
    keeper = registry.moments.get(store)
    state: Any = optimizer.state.get(param, {})
    block = block_of(param) if isinstance(keeper, BlockMoments) else 0
    if isinstance(keeper, BlockMoments) and block:
        if not state and rule.counts:
            state = optimizer.state[param] = first_state(optimizer, param)
            for name in rule.moments:
                zeros(state, name, param, keeper.kind)
        names = [f"{name}{CODES}" for name in rule.moments]
        if any(name not in state for name in names) or (rule.counts and "step" not in state):
            return None
        exponents = tuple(local(state[f"{name}{EXPONENTS}"]) for name in rule.moments)
        return MomentRows(keeper.kind if names else "fp32", tuple(local(state[n]) for n in names), exponents, block)
    found = [state.get(name) for name in rule.moments]
    if any(moment is None for moment in found) or (rule.counts and "step" not in state):
        return None
    kinds = {KINDS.get(moment.dtype) for moment in found}
    kind = kinds.pop() if kinds else "fp32"
    if kinds or kind in (None, "fp16") or (kind == "bf16" and keeper is None):
        return None
    return MomentRows(str(kind), tuple(map(local, found)))


def first_state(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Return the state that counts no step yet, as torch's Adam makes it."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    return {"step": torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")}
