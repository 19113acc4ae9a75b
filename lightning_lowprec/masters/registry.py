"""The masters of one optimizer: their stores, and the exchange of parameters and masters."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_lowprec.masters import moments
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.float32_values import drop, kept
from lightning_lowprec.masters.stores import STORES, RemainderStore, Store
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import chunks, grouped, is_one, multiply, parameters_of
from lightning_lowprec.private.torch import copy_all_, local_tensor, version_of
from lightning_lowprec.references import WeakList

BUCKET: Final = 64 * 2**20
"""Masters that a step loads at a time where no kernel steps: 256 MB of float32. A larger parameter is loaded alone."""
_FOLDED: Final = "lowprec_folded"  # an attribute of a gradient that the factor is meant for: a new one does not have it
ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along
SEVERAL_EVALUATIONS: Final = (
    "{} evaluates its closure where it has moved the weights, and half-precision weights follow their float32 masters"
    " after a step only. Use a precision with float32 weights (`bf16-mixed`, `32-true`, or in FP8 `fp8-hybrid`), or"
    " `torch.optim.AdamW`."
)
"""The error for an optimizer such as LBFGS."""
registries: WeakList[MasterRegistry] = WeakList()
"""Every registry that still exists, in the order in which they were made."""


@final
class MasterRegistry:
    """The masters of one optimizer, which keeps this object alive; ``values`` are known float32 weights, by id."""

    def __init__(self, config: MasterConfig, optimizer: Optimizer, values: Mapping[int, Tensor]) -> None:
        self.config = config
        self.master_of: dict[int, Tensor] = {}  # by id(parameter); the stores keep both alive
        self.param_of: dict[int, Tensor] = {}  # by id(master), in the same order
        self.stores: list[Store] = []  # of one device and dtype each, and of one bucket at most
        self.place_of: dict[int, tuple[Store, int]] = {}  # by id(parameter): its store, and its index there
        self.factor: float | Tensor = 1.0
        """What the step multiplies the gradients at the parameters by; a Tensor is a float32 scalar."""
        self._shown: dict[int, torch.dtype | None] = {}  # by id(parameter): `grad_dtype` before `show_grads`
        self.plain: Any = type(optimizer)  # the class that the optimizer had before it got masters
        self.optimizer = weakref.ref(optimizer)
        self._place_in_groups: dict[int, tuple[int, int]] = {}  # by id(parameter), as it was seen last
        self.in_step = False
        self.add_missing(values)
        if config.rounds:
            optimizer.param_groups[0].setdefault(ROUNDING_STEP, 0)
        registries.add(self)

    # ---- membership

    def params(self) -> list[Tensor]:
        """Return the tensors in the optimizer's groups, in order."""
        return parameters_of(self.live())

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter that has a master, with its master."""
        return zip(self.param_of.values(), self.master_of.values(), strict=True)

    def without_master(self) -> list[Tensor]:
        """Return the parameters that are their own masters."""
        return [p for p in self.params() if id(p) not in self.master_of]

    def group_index(self, param: Tensor) -> int | None:
        """Return the index of a parameter's group, or None; all groups are searched only where they have changed."""
        groups = self.live().param_groups
        index, place = self._place_in_groups.get(id(param), (0, 0))
        members = groups[index]["params"] if index < len(groups) else []
        if place < len(members) and members[place] is param:
            return index
        self._place_in_groups = {
            id(p): (index, place) for index, group in enumerate(groups) for place, p in enumerate(group["params"])
        }
        return self._place_in_groups.get(id(param), (None, 0))[0]

    def add_missing(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet."""
        half = {id(p): p for p in self.params() if p.dtype in HALF_DTYPES and not is_lazy(p)}
        new = grouped([p for key, p in half.items() if key not in self.master_of], lambda p: (p.device, p.dtype))
        state = self.live().state
        for members in (part for group in new for part in chunks(group, BUCKET)):
            start = self.stores[-1].start + self.stores[-1].elements if self.stores else 0
            known = kept(members) | {id(p): values[id(p)] for p in members if id(p) in values}
            store = STORES[self.config.form](members, known, seed=self.config.seed, start=start)
            self.stores.append(store)
            for index, (p, master) in enumerate(zip(store.params, store.masters, strict=True)):
                drop(p)
                self.place_of[id(p)] = (store, index)
                self.master_of[id(p)], self.param_of[id(master)] = master.requires_grad_(), p
                if p in state:  # made before there were masters, in the parameter's dtype
                    state[p] = moments.float32_state(state[p])

    def is_stale(self, config: MasterConfig) -> bool:
        """Return whether a parameter has another dtype than its master is for, or the masters are not by ``config``."""
        return config != self.config or any(p.dtype != store.dtype for store in self.stores for p in store.params)

    def live(self) -> Optimizer:
        """Return the optimizer, which keeps this object alive."""
        optimizer = self.optimizer()
        assert optimizer is not None
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
            self.stores, self.place_of, self.master_of, self.param_of = [], {}, {}, {}
            self.add_missing(values)
        self.add_missing({})

    def values(self) -> dict[int, Tensor]:
        """Return the float32 masters by ``id(parameter)``; none in stochastic form."""
        if self.config.form == "stochastic":
            return {}
        return {id(p): value for store in self.stores for p, value in zip(store.params, store.values(), strict=True)}

    def refresh(self, values: Mapping[int, Tensor] | None) -> None:
        """Follow the parameters, or take ``values`` where they round to theirs; others become their own masters."""
        for store in self.stores:
            store.refresh() if values is None else store.set_values(values)

    def saved(self) -> tuple[str, dict[int, Tensor]]:
        """Return what state dicts hold of masters, by ``id(parameter)``, and its name there.

        They hold float32 masters; beside coded moments, remainders: the tensors themselves, not copies.
        """
        if self.config.form != "remainder" or self.config.moments == "fp32":
            return moments.MASTER_PARAM, self.values()
        remainders: dict[int, Tensor] = {}
        for store in self.stores:
            store.settle(self.step)
            if isinstance(store, RemainderStore):
                remainders |= {id(p): t for p, t in zip(store.params, store.remainders(), strict=True)}
        return moments.MASTER_REMAINDER, remainders

    def take(self, values: Mapping[int, Tensor], remainders: Mapping[int, Tensor]) -> None:
        """Take the masters of a state dict by ``id(parameter)``: float32 values, or remainders beside the weights."""
        params = {id(p): p for store in self.stores for p in store.params}
        whole = {
            key: moments.joined(existing_masters([params[key]]).get(key, params[key]).bfloat16(), remainder)
            for key, remainder in remainders.items()
            if key in params and not (isinstance(self.place_of[key][0], RemainderStore) and _is_whole(remainder))
        }
        coming = {**values, **whole}
        for own in self.stores:
            own.round_again(coming)
            if coming and not any(id(p) in remainders for p in own.params):  # of a part of the parameters
                others = [i for i, p in enumerate(own.params) if id(p) not in coming]
                coming |= {id(own.params[i]): own.value(i) for i in others if self.config.form != "stochastic"}
        self.refresh(coming if values or remainders else None)
        for key, remainder in remainders.items():
            store, index = self.place_of.get(key, (None, 0))
            if isinstance(store, RemainderStore) and _is_whole(remainder):
                store.take_remainder(index, remainder)

    def take_moments(self, param: Tensor, coded: Mapping[str, Tensor]) -> None:
        """Take codes of a state dict: as they are if they are of this optimizer's format, else as float32 values."""
        keep = self.config.moments == "8bit" and id(param) in self.place_of and moments.is_our_format(coded, param)
        entry = {name: value.to(param.device, copy=True) for name, value in coded.items()}
        self.live().state[param].update(entry if keep else moments.decoded_entry(entry, param))

    # ---- gradients, between a backward and the step
    # at the masters, as float32: for code that clips or looks at float32 gradients
    # at the parameters, as the backward left them, with a factor: nothing is written, and no memory is needed

    def move_grads(self) -> None:
        """Move gradients to the masters."""
        self.hide_grads()
        self.follow_moves()
        self.deferred_grads()
        for store in self.stores:
            self._move(store)
        self.factor = 1.0

    def _move(self, store: Store) -> None:
        """Move the gradients of a store's parameters to its masters, times the folded factor."""
        pairs = [(p, m) for p, m in zip(store.params, store.masters, strict=True) if p.grad is not None]
        grads = _as_float32(store, [p.grad for p, _ in pairs if p.grad is not None])
        for p, _ in pairs:
            p.grad = None
        multiply(grads, self.factor)
        for (_, master), grad in zip(pairs, grads, strict=True):
            master.grad = grad if master.grad is None else master.grad + grad

    def fold_factor(self, factor: float | Tensor, grads: Iterable[Tensor]) -> None:
        """Multiply ``grads``, all gradients that stay at the parameters, by ``factor`` when the step reads them."""
        self.factor = factor if is_one(self.factor) else self.factor * factor
        for grad in grads:
            setattr(grad, _FOLDED, True)

    def deferred_grads(self) -> list[Tensor]:
        """Return the gradients that are at the parameters with masters; the folded factor is meant for all of them.

        ``model.zero_grad()`` and another backward may have replaced some: the others are multiplied now.
        """
        grads = [p.grad for p, _ in self.pairs() if p.grad is not None]
        if is_one(self.factor):
            return grads
        folded = [grad for grad in grads if hasattr(grad, _FOLDED)]
        if len(folded) < len(grads):
            multiply(folded, self.factor)
            for grad in folded:
                delattr(grad, _FOLDED)
            self.factor = 1.0
        return grads

    def show_grads(self) -> None:
        """Make the masters' gradients the ``grad`` of the parameters too: one tensor, so that edits reach the step."""
        for p, master in self.pairs():
            if master.grad is not None and p.grad is None:
                self._shown[id(p)] = p.grad_dtype
                p.grad_dtype = None  # any
                p.grad = master.grad

    def hide_grads(self) -> None:
        """Undo :meth:`show_grads`; a gradient that was assigned or dropped since then replaces the master's."""
        shown, self._shown = self._shown, {}
        for p, master in self.pairs() if shown else ():
            if id(p) in shown:
                grad, p.grad = p.grad, None
                p.grad_dtype = shown[id(p)]
                master.grad = None if grad is None else grad.float()

    def drop_grads(self) -> None:
        """Drop moved gradients; outside of a step, free the masters' memory too."""
        self.hide_grads()
        self.factor = 1.0
        for store in self.stores:
            for master in store.masters:
                master.grad = None
            if not self.in_step:
                store.release()

    # ---- a step

    @property
    def step(self) -> int:
        """The number of steps so far, for the random bits of stochastic rounding."""
        return int(self.live().param_groups[0].get(ROUNDING_STEP, 0))

    def count_step(self) -> None:
        """Note that all masters made a step."""
        if self.config.rounds:
            self.live().param_groups[0][ROUNDING_STEP] = self.step + 1

    def settle(self, store: Store) -> None:
        """Bring a store to the state between steps, with one gradient per parameter: for a kernel."""
        store.settle(self.step)
        if self.config.moments == "8bit":
            moments.encode_state(self.live().state, store, self.step)
        if any(p.grad is not None and m.grad is not None for p, m in zip(store.params, store.masters, strict=True)):
            self._move(store)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show the optimizer all masters; at the end, also after an error, save them and drop the moved gradients.

        Raises RuntimeError if parameters got gradients meanwhile: from weights that had not followed their masters.
        """
        self.load()
        self.move_grads()
        try:
            with self._loaded(self.stores), self.showing_masters():
                yield
        finally:
            self.count_step()
        if any(p.grad is not None for p, _ in self.pairs()):
            raise RuntimeError(SEVERAL_EVALUATIONS.format(self.plain.__name__))

    @contextmanager
    def changing(self, method: str, reads_gradients: bool) -> Iterator[None]:
        """Show the optimizer all masters beside its step; at the end, also after an error, save them.

        Moved gradients stay, unless the optimizer's ``method`` reads them. Raises TypeError, which names the method,
        where weights have no masters between steps.
        """
        if self.config.form == "stochastic":
            raise TypeError(
                f"`{method}` moves the weights between steps, and stochastic rounding would round them once more each"
                " time. Use a precision with float32 masters (`bf16-master`, `bf16-remainder`) or float32 weights."
            )
        if self.in_step:  # called by the step
            yield
        elif reads_gradients:
            with self.stepping():
                yield
        else:
            self.hide_grads()
            self.load()
            grads = [(master, master.grad) for master in self.master_of.values()]
            try:
                with self._loaded(self.stores), self.showing_masters():
                    yield
            finally:
                for master, grad in grads:
                    master.grad = grad

    @contextmanager
    def stepping_only(self, store: Store) -> Iterator[None]:
        """Load the masters of one store, and show the optimizer nothing else; at the end save them."""
        store.load()  # first, because it takes temporary memory
        self._move(store)
        with self._loaded([store]), self.showing_only(store.params):
            yield

    @contextmanager
    def showing_only(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Show the optimizer only these parameters, or their masters, in time that grows with their number alone."""
        optimizer = self.live()
        groups, state = optimizer.param_groups, optimizer.state
        shown: dict[int, list[Tensor]] = {}  # by the index of the group
        for p in params:
            if (index := self.group_index(p)) is not None:
                shown.setdefault(index, []).append(p)
        before = {index: groups[index]["params"] for index in shown}
        members = [p for group in shown.values() for p in group if p in state]
        optimizer.state = defaultdict(dict, {self.master_of.get(id(p), p): state[p] for p in members})
        for index, group in shown.items():
            groups[index]["params"] = [self.master_of.get(id(p), p) for p in group]
        optimizer.param_groups = [groups[index] for index in sorted(shown)]
        try:
            yield
        finally:
            state.update((self.param_of.get(id(key), key), entry) for key, entry in optimizer.state.items())
            optimizer.param_groups, optimizer.state = groups, state
            for index, group in before.items():
                groups[index]["params"] = group

    @contextmanager
    def _loaded(self, stores: Sequence[Store]) -> Iterator[None]:
        if self.config.moments == "8bit":
            for p in itertools.chain.from_iterable(store.params for store in stores):
                moments.decode_in_place(self.live().state.get(p, {}), p)
        self.in_step = True
        try:
            yield
        finally:
            self.hide_grads()
            for master in itertools.chain.from_iterable(store.masters for store in stores):
                master.grad = None  # first: rounding takes temporary memory too
            self.in_step = False
            for store in stores:
                store.save(self.step)
                if self.config.moments == "8bit":
                    moments.encode_state(self.live().state, store, self.step)

    def evaluated_once(self, result: Any) -> Callable[[], Any]:
        """Return a closure for the optimizer that returns ``result`` once, before a master has changed."""
        versions: list[int] = [version_of(store.flat) for store in self.stores]

        def closure() -> Any:
            if versions != [version_of(store.flat) for store in self.stores]:
                raise RuntimeError(SEVERAL_EVALUATIONS.format(self.plain.__name__))
            versions.append(-1)  # so that a second call raises
            return result

        return closure

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
        optimizer = self.live()
        for group in optimizer.param_groups:
            group["params"][:] = [other.get(id(p), p) for p in group["params"]]  # in place: others may keep the list
        items = [(other.get(id(key), key), entry) for key, entry in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(items)


def _is_whole(remainder: Tensor) -> bool:
    """Return whether a remainder of a state dict has 16 bits; one of an earlier form has 8."""
    return remainder.dtype == torch.int16


@torch.no_grad()
def _as_float32(store: Store, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 gradients, float32 ones themselves; in few calls if every parameter has a half-precision one."""
    if len(grads) < len(store.params) or any(grad.dtype == torch.float32 or grad.is_sparse for grad in grads):
        return [grad.float() for grad in grads]
    copies = store.tensors_on(torch.empty_like(store.flat))
    copy_all_([local_tensor(copy) for copy in copies], [local_tensor(grad) for grad in grads])
    return copies


def registry_of(optimizer: Optimizer) -> MasterRegistry | None:
    """Return the masters of an optimizer, or None."""
    registry: MasterRegistry | None = getattr(optimizer, "_masters", None)
    return registry


def optimizers_with_masters() -> list[Optimizer]:
    """Return the optimizers that have masters and still exist; a registry may be that of earlier masters."""
    pairs = [(registry, registry.optimizer()) for registry in registries if registry.stores]
    return [optimizer for registry, optimizer in pairs if optimizer is not None and registry_of(optimizer) is registry]


def places_of(parameter: Tensor) -> Iterator[tuple[Store, int]]:
    """Yield the stores that hold a float32 value of ``parameter``, the last one first, and its index there."""
    for registry in reversed(list(registries)):
        store, index = registry.place_of.get(id(parameter), (None, 0))
        if store is None or registry.config.form == "stochastic":
            continue
        if store.params[index] is parameter and parameter.dtype == store.dtype:
            yield store, index


def existing_masters(params: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return copies of the float32 values of half-precision ``params`` by ``id(parameter)``, where they are known.

    A value is the master, if an optimizer still has it, else what :mod:`~lightning_lowprec.masters.float32_values` has
    kept. It follows a parameter to which it does not round any more. Of two optimizers, the one that got its masters
    last counts.
    """
    wanted = list(params)
    found = kept(wanted)
    for p in wanted:
        for store, index in itertools.islice(places_of(p), 1):
            found[id(p)] = store.value(index).to(p.device)
    return found
