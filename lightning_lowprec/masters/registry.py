"""The masters of one optimizer: the stores that hold them, and the exchange of parameters and masters."""

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
from lightning_lowprec.numerics.parameters import parameters_of

ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along


class MasterRegistry:
    """The masters of one optimizer, which keeps this object alive.

    Args:
        config: the form of the masters.
        optimizer: has no masters yet; its groups and state contain the model's parameters.
        values: float32 weights by ``id(parameter)``, for the parameters whose weight is known.
    """

    def __init__(self, config: MasterConfig, optimizer: Optimizer, values: Mapping[int, Tensor]) -> None:
        self.config = config
        self.master_of: dict[int, Tensor] = {}  # by id(parameter); the stores keep both alive
        self.param_of: dict[int, Tensor] = {}  # by id(master)
        self._optimizer = weakref.ref(optimizer)
        self.stores: list[Store] = []  # one per device and dtype of the parameters
        self._moments = StochasticMoments(config.seed) if config.moments == "stochastic" else None
        self._stepping = False
        self._evaluated = False
        self._versions: list[int] = []  # of the stores, when the step began
        self.add_missing(values)
        if config.form == "stochastic":
            optimizer.param_groups[0].setdefault(ROUNDING_STEP, 0)

    # ---- membership

    def params(self) -> list[Tensor]:
        """Return the tensors in the optimizer's groups, in order."""
        return parameters_of(self._live())

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return every half-precision parameter with its master."""
        return [pair for store in self.stores for pair in zip(store.params, store.masters, strict=True)]

    def add_missing(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet, one store per device and dtype."""
        new: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for p in self.params():
            if p.dtype in HALF_DTYPES and id(p) not in self.master_of:
                new.setdefault((p.device, p.dtype), {})[id(p)] = p
        for members in new.values():
            store = self._new_store(list(members.values()), values)
            self.stores.append(store)
            for p, master in zip(store.params, store.masters, strict=True):
                self.master_of[id(p)], self.param_of[id(master)] = master, p
        if self._moments is None:
            self._cast_state({key for members in new.values() for key in members})

    def _new_store(self, params: list[Tensor], values: Mapping[int, Tensor]) -> Store:
        if self.config.form == "fp32":
            return Fp32Store(params, values)
        if self.config.form == "remainder":
            return RemainderStore(params, values)
        start = sum(store.buffer.flat.numel() for store in self.stores)
        return StochasticStore(params, values, seed=self.config.seed, start=start)

    def _cast_state(self, new: set[int]) -> None:
        """Cast state that the optimizer made before it had masters: its dtype is that of the parameters."""
        state = self._live().state
        for p in [p for p in state if id(p) in new]:
            state[p] = _float_halves(state[p])

    def _live(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer keeps its registry alive, so it exists"
        return optimizer

    # ---- values

    def load(self) -> None:
        """Give every master its value; follow parameters that were edited, added or moved since the last step."""
        if any(store.moved() for store in self.stores):
            values = self.values()
            self.stores, self.master_of, self.param_of = [], {}, {}
            self.add_missing(values)
        self.add_missing({})
        for store in self.stores:
            store.load()

    def values(self) -> dict[int, Tensor]:
        """Return the float32 masters by ``id(parameter)``; none in stochastic form."""
        values = {}
        for store in self.stores:
            masters = store.values()
            if masters is not None:
                values.update({id(p): master for p, master in zip(store.params, masters, strict=True)})
        return values

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take masters from a state dict; a parameter without a value becomes its own master."""
        for store in self.stores:
            store.set_values(values)

    def refresh(self, values: Mapping[int, Tensor] | None) -> None:
        """Follow the parameters, or take ``values`` where they round to their parameters."""
        for store in self.stores:
            store.refresh() if values is None else store.set_values(values)

    # ---- gradients

    def move_grads(self, inv_scale: float | Tensor) -> None:
        """Load masters, move gradients to them, and unscale the gradients of parameters without a master."""
        self.add_missing({})
        if any(p.grad is not None for store in self.stores for p in store.params):
            self.load()
        for store in self.stores:
            move_grads(store.params, store.masters, inv_scale)
        unscale_in_place([p for p in self.params() if id(p) not in self.master_of], inv_scale)

    def drop_grads(self) -> None:
        """Drop moved gradients; outside of a step, free the masters' memory too."""
        for store in self.stores:
            for master in store.masters:
                master.grad = None
            if not self._stepping:
                store.release()
        clear_marks(self.params())

    # ---- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Load the masters; at the end, also after an error, save them and drop the moved gradients."""
        self.load()
        if self._moments is not None:
            self._moments.load(self._live().state, self._with_master())
        self._stepping = True
        self._versions = [store.version for store in self.stores]
        self._evaluated = False
        try:
            yield
        finally:
            self.drop_grads()  # first: rounding takes temporary memory too
            self._save()
            self._stepping = False

    def first_evaluation_holds(self) -> bool:
        """Return whether this is the first evaluation of the step, and no master has changed yet."""
        moved = any(store.version != version for store, version in zip(self.stores, self._versions, strict=True))
        if self._evaluated or moved:
            return False
        self._evaluated = True
        return True

    def before_evaluation(self) -> None:
        """Copy the masters of this step into the parameters, and drop the last evaluation's gradients."""
        for i, store in enumerate(self.stores):
            if self._evaluated or store.version != self._versions[i]:  # edits of `master.data` leave the version
                store.cast_to_params()
        if self._evaluated:
            self.drop_grads()
        self._evaluated = True

    def _save(self) -> None:
        optimizer = self._live()
        step = optimizer.param_groups[0].get(ROUNDING_STEP, 0)
        for store in self.stores:
            store.save(step)
        if self._moments is not None:
            self._moments.save(optimizer.state, self._with_master(), step)
        if self.config.form == "stochastic":
            optimizer.param_groups[0][ROUNDING_STEP] = step + 1

    def _with_master(self) -> list[Tensor]:
        return [p for store in self.stores for p in store.params]

    @contextmanager
    def showing_masters(self) -> Iterator[None]:
        """Put masters in the place of parameters, in the optimizer's groups and state."""
        self.add_missing({})
        self._replace(self.master_of)
        try:
            yield
        finally:
            self._replace(self.param_of)

    @contextmanager
    def showing_params(self) -> Iterator[None]:
        """Within :meth:`showing_masters`: put the parameters back for a while."""
        self._replace(self.param_of)
        try:
            yield
        finally:
            self._replace(self.master_of)

    def _replace(self, other: Mapping[int, Tensor]) -> None:
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
