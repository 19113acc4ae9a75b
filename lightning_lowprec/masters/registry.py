"""What a wrapped optimizer knows about its masters: which stores hold them, and what its groups show."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.gradients import clear_marks, move_grads, unscale_in_place
from lightning_lowprec.masters.moments import StochasticMoments
from lightning_lowprec.masters.stores import Fp32Store, RemainderStore, StochasticStore, Store
from lightning_lowprec.numerics.formats import HALF_DTYPES

ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along


class MasterRegistry:
    """The masters of one optimizer, held by it.

    Args:
        config: the form of the masters.
        optimizer: not yet wrapped; its groups and state show the model's parameters.
        values: float32 weights by ``id(parameter)``, where known.
    """

    def __init__(self, config: MasterConfig, optimizer: Optimizer, values: Mapping[int, Tensor]) -> None:
        self.config = config
        self.master_of: dict[int, Tensor] = {}  # by id(parameter); the stores keep both alive
        self.param_of: dict[int, Tensor] = {}  # by id(master)
        self._optimizer = weakref.ref(optimizer)
        self._stores: list[Store] = []
        self._moments = StochasticMoments(config.seed) if config.moments == "stochastic" else None
        self._stepping = False
        self._evaluated = False
        self._shown: list[int] = []
        self.adopt(values)
        if config.form == "stochastic":
            optimizer.param_groups[0].setdefault(ROUNDING_STEP, 0)

    # ---- membership

    def params(self) -> list[Tensor]:
        """What the groups show, in order."""
        return [p for group in self._live().param_groups for p in group["params"]]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every half-precision parameter with its master."""
        for store in self._stores:
            yield from zip(store.params, store.masters, strict=True)

    def stores(self) -> list[Store]:
        """One per device and dtype of the parameters."""
        return list(self._stores)

    def adopt(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet, one store per device and dtype."""
        new: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for p in self._without_master():
            new.setdefault((p.device, p.dtype), {})[id(p)] = p
        for members in new.values():
            store = self._new_store(list(members.values()), values)
            self._stores.append(store)
            for p, master in zip(store.params, store.masters, strict=True):
                self.master_of[id(p)], self.param_of[id(master)] = master, p
        if self._moments is None:
            self._cast_state({key for members in new.values() for key in members})

    def _without_master(self) -> list[Tensor]:
        return [p for p in self.params() if p.dtype in HALF_DTYPES and id(p) not in self.master_of]

    def _new_store(self, params: list[Tensor], values: Mapping[int, Tensor]) -> Store:
        if self.config.form == "fp32":
            return Fp32Store(params, values)
        if self.config.form == "remainder":
            return RemainderStore(params, values)
        start = sum(store.buffer.flat.numel() for store in self._stores)
        return StochasticStore(params, values, seed=self.config.seed, start=start)

    def _cast_state(self, adopted: set[int]) -> None:
        """State that an optimizer made before it had masters is of its parameters' dtype."""
        state = self._live().state
        for p in [p for p in state if id(p) in adopted]:
            state[p] = _float_halves(state[p])

    def _live(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer holds this book"
        return optimizer

    # ---- values

    def load(self) -> None:
        """Give every master its value; follow parameters that were edited, added or moved since."""
        if any(store.moved() for store in self._stores):
            values = self.values()
            self._stores, self.master_of, self.param_of = [], {}, {}
            self.adopt(values)
        self.adopt({})
        for store in self._stores:
            store.load()

    def values(self) -> dict[int, Tensor]:
        """The float32 masters by ``id(parameter)``; none in stochastic form."""
        kept = [(store, store.values()) for store in self._stores]
        return {
            id(p): value
            for store, values in kept
            if values is not None
            for p, value in zip(store.params, values, strict=True)
        }

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take masters from a state dict; a parameter without one is its own."""
        for store in self._stores:
            store.set_values(values)

    def refresh(self, values: Mapping[int, Tensor] | None) -> None:
        """Follow the parameters, or take ``values`` where they round to them."""
        for store in self._stores:
            store.refresh() if values is None else store.set_values(values)

    # ---- gradients

    def move_grads_to_masters(self, inv_scale: float | Tensor) -> None:
        """Move gradients to the masters, loaded for it, and unscale those of parameters without one."""
        self.adopt({})
        if any(p.grad is not None for store in self._stores for p in store.params):
            self.load()
        for store in self._stores:
            move_grads(store.params, store.masters, inv_scale)
        if isinstance(inv_scale, Tensor) or inv_scale != 1.0:
            unscale_in_place([p for p in self.params() if id(p) not in self.master_of], inv_scale)

    def drop_grads(self) -> None:
        """Forget moved gradients; outside of a step, give the masters' memory back."""
        for store in self._stores:
            for master in store.masters:
                master.grad = None
            if not self._stepping:
                store.release()
        clear_marks(self.params())

    # ---- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Masters loaded on entry; saved, and moved gradients dropped, on exit, also after an error."""
        self.load()
        if self._moments is not None:
            self._moments.load(self._live().state, self._with_master())
        self._stepping = True
        self._shown = [store.version for store in self._stores]
        self._evaluated = False
        try:
            yield
        finally:
            self.drop_grads()  # first: rounding takes temporary memory too
            self._save()
            self._stepping = False

    def first_evaluation_holds(self) -> bool:
        """Whether this is the first evaluation of the step, and of the weights as they still are."""
        moved = any(store.version != shown for store, shown in zip(self._stores, self._shown, strict=True))
        if self._evaluated or moved:
            return False
        self._evaluated = True
        return True

    def before_evaluation(self) -> None:
        """Show the model what the masters have become in this step, and forget the last evaluation's gradients."""
        for i, store in enumerate(self._stores):
            if self._evaluated or store.version != self._shown[i]:  # `master.data` may have moved unseen
                store.show()
        if self._evaluated:
            self.drop_grads()
        self._evaluated = True

    def _save(self) -> None:
        optimizer = self._live()
        step = optimizer.param_groups[0].get(ROUNDING_STEP, 0)
        for store in self._stores:
            store.save(step)
        if self._moments is not None:
            self._moments.save(optimizer.state, self._with_master(), step)
        if self.config.form == "stochastic":
            optimizer.param_groups[0][ROUNDING_STEP] = step + 1

    def _with_master(self) -> list[Tensor]:
        return [p for store in self._stores for p in store.params]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Groups and state of the optimizer show masters."""
        self.adopt({})
        self._show(self.master_of)
        try:
            yield
        finally:
            self._show(self.param_of)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within :meth:`inside`: they show the parameters again."""
        self._show(self.param_of)
        try:
            yield
        finally:
            self._show(self.master_of)

    def _show(self, other: Mapping[int, Tensor]) -> None:
        optimizer = self._live()
        for group in optimizer.param_groups:
            group["params"][:] = [other.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
        items = [(other.get(id(key), key), entry) for key, entry in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(items)


def _float_halves(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF_DTYPES else value
    if isinstance(value, dict):
        return {key: _float_halves(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_float_halves(v) for v in value)
    return value
