"""Keep optimizer state in bf16 with stochastic rounding, for parameters without stored masters.

Plain bf16 state does not work: bf16 ``exp_avg_sq`` times 0.999 rounds back to itself and never decays. With stochastic
rounding it decays on average, and a moment is an average anyway.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.flat import FlatBuffer, local
from lightning_lowprec.private.torch import copy_all_

_SEED_STEP: Final = 1 << 32  # added to the seed per kind of state: weights and moments round independently
OptimizerState = MutableMapping[Any, Any]
Kind = tuple[str, torch.device]  # the name of a state, for example exp_avg, and its device


class StochasticMoments:
    """Optimizer state that is float32 inside a step and bf16 between steps, if it has the shape of its parameter.

    State tensors without dimensions stay float32: they are counters and running products, and need no memory.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buffers: dict[Kind, _StateBuffers] = {}

    @torch.no_grad()
    def load(self, state: OptimizerState, params: Sequence[Tensor]) -> None:
        """Make the state of ``params`` float32."""
        for kind, owners in _owners_by_kind(state, params).items():
            self._buffers_of(kind, owners, state).load(state)

    @torch.no_grad()
    def save(self, state: OptimizerState, params: Sequence[Tensor], step: int) -> None:
        """Round the state of ``params`` to bf16, also state that is new; ``step`` counts the calls."""
        owners = _owners_by_kind(state, params)
        for number, kind in enumerate(sorted(owners, key=str), start=1):
            self._buffers_of(kind, owners[kind], state).save(state, self._seed + number * _SEED_STEP, step)

    def _buffers_of(self, kind: Kind, owners: list[Tensor], state: OptimizerState) -> _StateBuffers:
        buffers = self._buffers.get(kind)
        if buffers is None or not buffers.hold(owners, state):  # the state is new, was loaded, or was moved
            buffers = self._buffers[kind] = _StateBuffers(kind[0], owners, state)
        return buffers


class _StateBuffers:
    """The state ``name`` of ``owners`` in two flat buffers: float32 while loaded, bf16 between steps."""

    def __init__(self, name: str, owners: Sequence[Tensor], state: OptimizerState) -> None:
        self._name, self._owners = name, owners
        tensors = [state[p][name] for p in owners]
        self._float32 = FlatBuffer(tensors, torch.float32)
        self._bf16 = FlatBuffer(tensors, torch.bfloat16)
        copy_all_(self._float32.views, [local(t) for t in tensors])
        self._put(self._float32, state)

    def hold(self, owners: Sequence[Tensor], state: OptimizerState) -> bool:
        """Return whether the state still consists of tensors of these buffers, for the same owners."""
        tensors = self._float32.tensors if self._float32.allocated else self._bf16.tensors
        return len(owners) == len(self._owners) and all(
            p is owner and state[p][self._name] is tensor
            for p, owner, tensor in zip(owners, self._owners, tensors, strict=True)
        )

    def load(self, state: OptimizerState) -> None:
        if not self._float32.allocated:
            self._float32.allocate()
            self._float32.flat.copy_(self._bf16.flat)
            self._put(self._float32, state)

    def save(self, state: OptimizerState, seed: int, step: int) -> None:
        rounding.stochastic_round_(self._float32.flat, seed=seed, step=step)
        self._bf16.flat.copy_(self._float32.flat)
        self._float32.free()
        self._put(self._bf16, state)

    def _put(self, buffer: FlatBuffer, state: OptimizerState) -> None:
        for p, tensor in zip(self._owners, buffer.tensors, strict=True):
            state[p][self._name] = tensor


def _owners_by_kind(state: OptimizerState, params: Sequence[Tensor]) -> dict[Kind, list[Tensor]]:
    """Return the parameters that have a state tensor of the same shape, for every kind of state."""
    owners: dict[Kind, list[Tensor]] = {}
    for p in params:
        for name, value in state[p].items() if p in state else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.shape == p.shape:
                owners.setdefault((name, value.device), []).append(p)
    return owners
