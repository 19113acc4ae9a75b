"""The masters of one optimizer: their stores, and the exchange of parameters and masters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_lowprec.masters.block_moments import BlockMoments
from lightning_lowprec.masters.coded_state import joined, moments_kept, put_moments
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.gradients import MasterGradients, forget_unscaled, unscale_in_place
from lightning_lowprec.masters.moments import StochasticMoments
from lightning_lowprec.masters.stores import Fp32Store, RemainderStore, StochasticStore, Store
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import chunks, parameters_of
from lightning_lowprec.private.torch import tree_map_only

ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along
_numbers = itertools.count()
_registries: weakref.WeakValueDictionary[int, MasterRegistry] = weakref.WeakValueDictionary()
"""Every registry that still exists, in the order in which they were made."""


@final
class MasterRegistry:
    """The masters of one optimizer, which keeps this object alive.

    ``values`` are float32 weights by ``id(parameter)``, for the parameters whose float32 weight is known.
    """

    def __init__(self, config: MasterConfig, optimizer: Optimizer, values: Mapping[int, Tensor]) -> None:
        self.config = config
        self.master_of: dict[int, Tensor] = {}  # by id(parameter); the stores keep both alive
        self.param_of: dict[int, Tensor] = {}  # by id(master), in the same order
        self._optimizer = weakref.ref(optimizer)
        self.stores: list[Store] = []  # of one device and dtype each, and of `bucket_bytes` at most
        self.moments: dict[Store, StochasticMoments | BlockMoments] = {}  # of the stores whose moments are not float32
        self.place_of: dict[int, tuple[Store, int]] = {}  # by id(parameter): its store, and its index there
        self.gradients = MasterGradients()
        self._stepping = False
        self.add_missing(values)
        if config.rounds:
            optimizer.param_groups[0].setdefault(ROUNDING_STEP, 0)
        _registries[next(_numbers)] = self

    # ---- membership

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer; None if it is gone, or has other masters by now."""
        optimizer = self._optimizer()
        return optimizer if optimizer is not None and vars(optimizer).get("_masters") is self else None

    def params(self) -> list[Tensor]:
        """Return the tensors in the optimizer's groups, in order."""
        return parameters_of(self._live())

    def add_missing(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet; see ``MasterConfig.bucket_bytes``."""
        new: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for p in self.params():
            if p.dtype in HALF_DTYPES and id(p) not in self.master_of and not is_lazy(p):
                new.setdefault((p.device, p.dtype), {})[id(p)] = p
        state = self._live().state
        limit = self.config.bucket_bytes // 4 if self.config.update == "step" else 1  # elements
        for members in (part for group in new.values() for part in chunks(group.values(), limit)):
            store = self._new_store(members, values)
            self.stores.append(store)
            for index, (p, master) in enumerate(zip(store.params, store.masters, strict=True)):
                self.place_of[id(p)] = (store, index)
                self.master_of[id(p)], self.param_of[id(master)] = master.requires_grad_(), p
                if p in state and not isinstance(
                    self.moments.get(store), StochasticMoments
                ):  # made before there were masters, in the parameter's dtype
                    state[p] = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF_DTYPES else t, state[p])

    def _new_store(self, params: list[Tensor], values: Mapping[int, Tensor]) -> Store:
        config = self.config
        start = sum(store.elements for store in self.stores)
        store: Store
        if config.form == "stochastic":
            store = StochasticStore(params, values, seed=config.seed, start=start)
        else:
            store = Fp32Store(params, values) if config.form == "fp32" else RemainderStore(params, values)
            store.start = start
        if config.moments == "stochastic":
            self.moments[store] = StochasticMoments(config.seed, start)
        elif config.moments != "fp32":
            self.moments[store] = BlockMoments(config.moments, store, config.seed)
        return store

    def _live(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer keeps its registry alive, so it exists"
        return optimizer

    # ---- values

    def load(self) -> None:
        """Give every master its value; follow parameters that were edited, added or moved since the last step."""
        self.follow_moves()
        for store in self.stores:
            store.load()

    def follow_moves(self) -> None:
        """Follow parameters that were added or moved to another device since the last step."""
        if any(store.moved() for store in self.stores):
            values = self.values()
            self.stores, self.moments, self.place_of, self.master_of, self.param_of = [], {}, {}, {}, {}
            self.add_missing(values)
        self.add_missing({})

    def values(self) -> dict[int, Tensor]:
        """Return the float32 masters by ``id(parameter)``; none in stochastic form."""
        if self.config.form == "stochastic":
            return {}
        return {id(p): value for store in self.stores for p, value in zip(store.params, store.values(), strict=True)}

    def refresh(self, values: Mapping[int, Tensor] | None) -> None:
        """Follow the parameters, or take ``values`` where they round to their parameters.

        A parameter that is not among the ``values`` becomes its own master.
        """
        for store in self.stores:
            store.refresh() if values is None else store.set_values(values)

    @property
    def is_coded(self) -> bool:
        """Whether state dicts contain remainders instead of float32 masters, see `coded_state.py`."""
        return self.config.form == "remainder" and self.config.moments != "fp32"

    def remainders(self) -> dict[int, Tensor]:
        """Return the remainders by ``id(parameter)``, in remainder form: the tensors themselves, not copies."""
        found: dict[int, Tensor] = {}
        for store in self.stores:
            store.settle(self.step)
            if isinstance(store, RemainderStore):
                found |= {id(p): t for p, t in zip(store.params, store.remainders(), strict=True)}
        return found

    def take(self, values: Mapping[int, Tensor], remainders: Mapping[int, Tensor]) -> None:
        """Take the masters of a state dict by ``id(parameter)``: float32 values, or remainders beside the weights."""
        params = {id(p): p for store in self.stores for p in store.params}
        whole = {
            key: joined(params[key], remainder)
            for key, remainder in remainders.items()
            if key in params and not isinstance(self.place_of[key][0], RemainderStore)
        }
        self.refresh({**values, **whole} if values or remainders else None)
        for key, remainder in remainders.items():
            store, index = self.place_of.get(key, (None, 0))
            if isinstance(store, RemainderStore):
                store.take_remainder(index, remainder)

    def take_moments(self, param: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Take codes of a state dict: as they are if they are of this optimizer's format, else as float32 values."""
        keeper = self.moments.get(self.place_of[id(param)][0]) if id(param) in self.place_of else None
        put_moments(self._live(), param, moments, kept=moments_kept(moments, keeper, param))

    # ---- gradients

    def move_grads(self, inv_scale: float | Tensor) -> None:
        """Move gradients to the masters, and unscale the gradients of parameters without a master."""
        self.gradients.hide(self.pairs())
        self.follow_moves()
        self.deferred_grads()
        for store in self.stores:
            self.gradients.move(store, inv_scale)
        self.gradients.factor = 1.0
        unscale_in_place(self.without_master(), inv_scale)

    def deferred_grads(self) -> list[Tensor]:
        """Return the gradients that are at the parameters with masters; the folded factor is meant for all of them."""
        grads = [p.grad for p, _ in self.pairs() if p.grad is not None]
        self.gradients.forget_others(grads)
        return grads

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter that has a master, with its master."""
        return zip(self.param_of.values(), self.master_of.values(), strict=True)

    def without_master(self) -> list[Tensor]:
        """Return the parameters that are their own masters."""
        return [p for p in self.params() if id(p) not in self.master_of]

    def drop_grads(self) -> None:
        """Drop moved gradients; outside of a step, free the masters' memory too."""
        self.gradients.hide(self.pairs())
        self.gradients.factor = 1.0
        self._drop_moved(self.stores)
        forget_unscaled(self.params())

    def _drop_moved(self, stores: Iterable[Store]) -> None:
        for store in stores:
            for master in store.masters:
                master.grad = None
            if not self._stepping:
                store.release()

    # ---- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Load the masters; at the end, also after an error, save them and drop the moved gradients."""
        self.load()
        try:
            with self._loaded(self.stores):
                yield
        finally:
            self.count_step()

    @property
    def step(self) -> int:
        """The number of steps so far, for the random bits of stochastic rounding."""
        return int(self._live().param_groups[0].get(ROUNDING_STEP, 0))

    def count_step(self) -> None:
        """Note that all masters made a step."""
        if self.config.rounds:
            self._live().param_groups[0][ROUNDING_STEP] = self.step + 1

    def settle(self, store: Store) -> None:
        """Bring a store to the state between steps, with one gradient per parameter: for a kernel."""
        store.settle(self.step)
        if store in self.moments:
            self.moments[store].settle(self._live().state, store.params, self.step)
        if any(p.grad is not None and m.grad is not None for p, m in zip(store.params, store.masters, strict=True)):
            self.gradients.move(store, 1.0)

    @contextmanager
    def stepping_only(self, store: Store) -> Iterator[None]:
        """Load the masters of one store, and show the optimizer nothing else; at the end save them."""
        store.load()  # first, because it takes temporary memory
        self.gradients.move(store, 1.0)
        with self._loaded([store]), self.showing_masters(), self.showing_only(store.masters):
            yield

    @contextmanager
    def showing_only(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Show the optimizer only these parameters, or masters that it sees now, in its groups."""
        optimizer = self._live()
        kept = {id(p) for p in params}
        groups = optimizer.param_groups
        before = [list(group["params"]) for group in groups]
        for group in groups:
            group["params"][:] = [p for p in group["params"] if id(p) in kept]
        optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = groups
            for group, members in zip(groups, before, strict=True):
                group["params"][:] = members

    @contextmanager
    def _loaded(self, stores: Sequence[Store]) -> Iterator[None]:
        state = self._live().state
        for store in stores:
            if store in self.moments:
                self.moments[store].load(state, store.params)
        self._stepping = True
        try:
            yield
        finally:
            self.gradients.hide(self.pairs())
            self._drop_moved(stores)  # first: rounding takes temporary memory too
            forget_unscaled(self.params())
            self._stepping = False
            for store in stores:
                store.save(self.step)
                if store in self.moments:
                    self.moments[store].save(state, store.params, self.step)

    def evaluation(self, closure: Callable[[], Any], first: Any) -> Callable[[], Any]:
        """Return ``closure`` for the optimizer: the model sees its weights, the optimizer float32 gradients.

        The first call returns ``first``, unless the optimizer has moved the masters before.
        """
        versions = {store: store.version for store in self.stores}
        evaluated = False

        def evaluate() -> Any:
            nonlocal evaluated  # edits of `master.data` leave the version, so later calls cast all masters
            changed = [store for store in self.stores if evaluated or store.version != versions[store]]
            if not evaluated and not changed:
                evaluated = True
                return first
            self._replace(self.param_of)
            try:
                for store in changed:
                    store.cast_to_params()
                if evaluated:
                    self.drop_grads()
                evaluated = True
                result = closure()
            finally:
                self._replace(self.master_of)
            self.move_grads(1.0)
            return result

        return evaluate

    @contextmanager
    def showing_masters(self) -> Iterator[None]:
        """Put masters in the place of parameters, in the optimizer's groups and state."""
        self.add_missing({})
        self._replace(self.master_of)
        try:
            yield
        finally:
            self._replace(self.param_of)

    def _replace(self, other: Mapping[int, Tensor]) -> None:
        optimizer = self._live()
        for group in optimizer.param_groups:
            group["params"][:] = [other.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
        items = [(other.get(id(key), key), entry) for key, entry in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(items)


def all_registries() -> list[MasterRegistry]:
    """Return every registry whose optimizer still exists."""
    return list(_registries.values())


def optimizers_with_masters() -> list[Optimizer]:
    """Return the optimizers that have masters and still exist."""
    return [optimizer for optimizer in (r.optimizer() for r in all_registries() if r.stores) if optimizer is not None]


def existing_masters(params: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return copies of the float32 masters of ``params`` by ``id(parameter)``, if an optimizer still has them.

    A master that no longer rounds to its parameter follows the parameter. Of two optimizers, the one that got its
    masters last counts. A parameter that is not half precision any more has no master here.
    """
    wanted = {id(p): p for p in params}
    found: dict[int, Tensor] = {}
    for registry in _registries.values():
        for store in registry.stores:
            held = [p for p in store.params if wanted.get(id(p)) is p]
            if held and registry.config.form != "stochastic" and all(p.dtype == store.dtype for p in store.params):
                store.follow_edits()
                values = {id(p): value for p, value in zip(store.params, store.values(), strict=True)}
                found |= {id(p): values[id(p)].detach().to(p.device, copy=True) for p in held}
    return found
