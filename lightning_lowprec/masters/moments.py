"""Optimizer state in bf16, rounded stochastically, for parameters that have no master either.

Plain bf16 state does not work: bf16 ``exp_avg_sq`` times 0.999 rounds back to itself and never decays. Stochastic
rounding decays it on average, and an average is what a moment is.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.flat import FlatBuffer, local

_STREAM: Final = 1 << 32  # added to the seed per kind of state: weights and moments round independently
State = MutableMapping[Any, Any]


class StochasticMoments:
    """float32 state inside a step, bf16 between steps, for every state tensor shaped like its parameter.

    Tensors of no dimension stay float32: they are counters and running products, and cost nothing.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shelves: dict[tuple[str, torch.device], _Shelf] = {}

    @torch.no_grad()
    def load(self, state: State, params: Sequence[Tensor]) -> None:
        """Make the state of ``params`` (by parameter) float32."""
        for place, owners in _places(state, params).items():
            self._shelf(place, owners, state).load(state)

    @torch.no_grad()
    def save(self, state: State, params: Sequence[Tensor], step: int) -> None:
        """Round the state of ``params`` into bf16, also what the step has created; ``step`` counts the calls."""
        places = _places(state, params)
        for number, place in enumerate(sorted(places, key=str), start=1):
            self._shelf(place, places[place], state).save(state, self._seed + number * _STREAM, step)

    def _shelf(self, place: tuple[str, torch.device], owners: list[Tensor], state: State) -> _Shelf:
        shelf = self._shelves.get(place)
        if shelf is None or not shelf.holds(owners, state):  # new, loaded or moved from outside
            shelf = self._shelves[place] = _Shelf(place[0], owners, state)
        return shelf


class _Shelf:
    """One kind of state, ``key``, of ``owners``: flat in float32 while loaded, flat in bf16 at rest."""

    def __init__(self, key: str, owners: Sequence[Tensor], state: State) -> None:
        self._key, self._owners = key, owners
        tensors = [state[p][key] for p in owners]
        self._full = FlatBuffer(tensors, torch.float32)
        self._rest = FlatBuffer(tensors, torch.bfloat16)
        torch._foreach_copy_(self._full.views, [local(t) for t in tensors])
        self._show(self._full, state)

    def holds(self, owners: Sequence[Tensor], state: State) -> bool:
        """Whether the state is what this shelf has put there, for the same owners."""
        shown = self._full.tensors if self._full.allocated else self._rest.tensors
        return len(owners) == len(self._owners) and all(
            p is owner and state[p][self._key] is tensor
            for p, owner, tensor in zip(owners, self._owners, shown, strict=True)
        )

    def load(self, state: State) -> None:
        if not self._full.allocated:
            self._full.allocate()
            self._full.flat.copy_(self._rest.flat)
            self._show(self._full, state)

    def save(self, state: State, seed: int, step: int) -> None:
        rounding.stochastic_round_(self._full.flat, seed=seed, step=step)
        self._rest.flat.copy_(self._full.flat)
        self._full.free()
        self._show(self._rest, state)

    def _show(self, buffer: FlatBuffer, state: State) -> None:
        for p, tensor in zip(self._owners, buffer.tensors, strict=True):
            state[p][self._key] = tensor


def _places(state: State, params: Sequence[Tensor]) -> dict[tuple[str, torch.device], list[Tensor]]:
    """Which parameters have a state tensor of their shape, by its key and device."""
    places: dict[tuple[str, torch.device], list[Tensor]] = {}
    for p in params:
        for key, value in state[p].items() if p in state else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.shape == p.shape:
                places.setdefault((key, value.device), []).append(p)
    return places
