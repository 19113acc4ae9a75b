"""Keep optimizer state in bf16 with stochastic rounding, for parameters without stored masters.

Plain bf16 state does not work: bf16 ``exp_avg_sq`` times 0.999 rounds back to itself and never decays. With stochastic
rounding it decays on average, and a moment is an average anyway. Moments are stored as weights are in stochastic form:
bf16 tensors, which a :class:`~lightning_lowprec.masters.stores.StochasticStore` makes float32 for a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.masters.stores import StochasticStore
from lightning_lowprec.numerics.flat import FlatBuffer, local
from lightning_lowprec.private.torch import copy_all_

SEED_STEP: Final = 1 << 32  # added to the seed per kind of state: weights and moments round independently
OptimizerState = MutableMapping[Any, Any]
Kind = tuple[str, torch.device]  # the name of a state, for example exp_avg, and its device


@final
class StochasticMoments:
    """Optimizer state that is float32 inside a step and bf16 between steps, if it has the shape of its parameter.

    State tensors without dimensions stay float32: they are counters and running products, and need no memory.

    Args:
        seed: the seed of the run.
        start: the position of the first element of the parameters among all parameters, for the random bits.
    """

    def __init__(self, seed: int, start: int = 0) -> None:
        self._seed, self._start = seed, start
        self._stores: dict[Kind, StochasticStore] = {}

    @torch.no_grad()
    def load(self, state: OptimizerState, params: Iterable[Tensor]) -> None:
        """Make the state of ``params`` float32."""
        for kind, entries in _entries_by_kind(state, params).items():
            store = self._store_of(kind, entries)
            if not store.buffer.allocated:
                store.load()
            _put(kind, entries, store.masters)

    @torch.no_grad()
    def save(self, state: OptimizerState, params: Iterable[Tensor], step: int) -> None:
        """Round the state of ``params`` to bf16, also state that is new; ``step`` counts the calls."""
        found = sorted(_entries_by_kind(state, params).items(), key=lambda item: str(item[0]))
        for number, (kind, entries) in enumerate(found, start=1):
            store = self._store_of(kind, entries)
            store.seed = self._seed + number * SEED_STEP
            store.save(step)
            _put(kind, entries, store.params)

    def settle(self, state: OptimizerState, params: Sequence[Tensor], step: int) -> None:
        """Make float32 state of ``params``, for example from a checkpoint, bf16."""
        found = _entries_by_kind(state, params).items()
        if any(entry[name].dtype == torch.float32 for (name, _), entries in found for entry in entries):
            self.load(state, params)
            self.save(state, params, step)

    def _store_of(self, kind: Kind, entries: list[OptimizerState]) -> StochasticStore:
        """Return the store that holds this state; a new, loaded store if the state is new, was loaded or was moved."""
        tensors = [entry[kind[0]] for entry in entries]
        store = self._stores.get(kind)
        if store is not None:
            held = store.masters if store.buffer.allocated else store.params
            if len(held) == len(tensors) and all(map(operator.is_, held, tensors)):
                return store
        made = FlatBuffer(tensors, torch.bfloat16).tensors
        store = self._stores[kind] = StochasticStore(made, {}, seed=self._seed, start=self._start)
        store.buffer.allocate()
        copy_all_(store.buffer.views, [local(t) for t in tensors])
        return store


def _put(kind: Kind, entries: list[OptimizerState], tensors: list[Tensor]) -> None:
    for entry, tensor in zip(entries, tensors, strict=True):
        entry[kind[0]] = tensor


def _entries_by_kind(state: OptimizerState, params: Iterable[Tensor]) -> dict[Kind, list[OptimizerState]]:
    """Return, by kind of state, the entries of ``params`` with a tensor of the parameter's shape under this name."""
    entries: dict[Kind, list[OptimizerState]] = {}
    for p in params:
        for name, value in state[p].items() if p in state else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.shape == p.shape:
                entries.setdefault((name, value.device), []).append(state[p])
    return entries
