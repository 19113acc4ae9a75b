"""The masters of one optimizer: their stores, and the exchange of parameters and masters."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_lowprec.masters import moments
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.float32_values import drop, kept
from lightning_lowprec.masters.stores import ROUNDING_STEP, STORES, Group, RemainderStore, Store, steps_of
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.fp8_matrices import answer
from lightning_lowprec.numerics.parameters import WeakList, chunks, grouped, parameters_of
from lightning_lowprec.private.torch import local_tensor

BUCKET: Final = 64 * 2**20
"""Masters that a step loads at a time where no kernel steps: 256 MB of float32. A larger parameter is loaded alone."""
registries: "WeakList[MasterRegistry]" = WeakList()
"""Every registry that still exists, in the order in which they were made."""


@final
class MasterRegistry:
    """The masters of one optimizer, which keeps this object alive; ``values`` are known float32 weights, by id."""

    def __init__(self, config: MasterConfig, optimizer: Optimizer, values: Mapping[int, Tensor]) -> None:
        self.config = config
        self.master_of: dict[int, Tensor] = {}  # by id(parameter); the stores keep both alive
        self.param_of: dict[int, Tensor] = {}  # by id(master), in the same order
        self.stores: list[Store] = []  # of one group of the optimizer, device and dtype each, and one bucket at most
        self.place_of: dict[int, tuple[Store, int]] = {}  # by id(parameter): its store, and its index there
        self.groups: list[Group] = []
        self.ids: list[list[int]] = []  # of the parameters in the optimizer's groups, when `groups` was made
        self.factor: float | Tensor | None = None
        """What the step multiplies the gradients at the parameters by; a Tensor is a float32 scalar."""
        self.shown: dict[int, torch.dtype | None] = {}  # by id(parameter): `grad_dtype` before `show_grads`
        self.plain: Any = type(optimizer)  # the class that the optimizer had before it got masters
        self.optimizer = weakref.ref(optimizer)
        self.rounds = config.rounds
        self.in_step = False
        self.add_missing(values)
        if self.rounds:
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

    def add_missing(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet."""
        groups = [list(group["params"]) for group in self.live().param_groups]
        half = {
            id(p): (index, p)
            for index, params in enumerate(groups)
            for p in params
            if p.dtype in HALF_DTYPES and not is_lazy(p) and id(p) not in self.master_of
        }
        for same in grouped(half.values(), lambda pair: (pair[0], pair[1].device, pair[1].dtype)):
            for members in chunks([p for _, p in same], BUCKET):
                self._add_store(members, same[0][0], values)
        self.groups = []
        for index, params in enumerate(groups):
            mine, now = [store for store in self.stores if store.group == index], {*map(id, params)}
            for stores in grouped(mine, lambda store: (store.device, store.dtype)):
                held = [p for store in stores for p in store.params if id(p) in now]
                self.groups.append(Group(index, held, [self.master_of[id(p)] for p in held], stores))
            own = [p for p in params if id(p) not in self.master_of]
            self.groups.append(Group(index, own, own, []))
        self.ids = [[*map(id, params)] for params in groups]

    def _add_store(self, members: Sequence[Tensor], group: int, values: Mapping[int, Tensor]) -> None:
        start = self.stores[-1].start + self.stores[-1].elements if self.stores else 0
        known = kept(members) | {id(p): values[id(p)] for p in members if id(p) in values}
        store = STORES[self.config.form](members, known, seed=self.config.seed, start=start)
        store.group = group
        self.stores.append(store)
        state = self.live().state
        for index, (p, master) in enumerate(zip(store.params, store.masters, strict=True)):
            drop(p)
            answer(p)
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

    def follow_moves(self) -> None:
        """Follow parameters that were added, or moved to another device or group."""
        groups = enumerate(self.live().param_groups)
        now = {id(p): index for index, group in groups for p in group["params"]}
        values: dict[int, Tensor] = {}
        if any(store.moved() or any(now.get(id(p), store.group) != store.group for p in store.params)
               for store in self.stores):  # fmt: skip
            values = self.values()
            self.stores, self.place_of, self.master_of, self.param_of = [], {}, {}, {}
        self.add_missing(values)

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
            store.settle(steps_of(self.live()))
            if isinstance(store, RemainderStore):
                remainders |= {id(p): t for p, t in zip(store.params, store.tensors_on(store.remainder), strict=True)}
        return moments.MASTER_REMAINDER, remainders

    def take(self, values: Mapping[int, Tensor], remainders: Mapping[int, Tensor]) -> None:
        """Take the masters of a state dict by ``id(parameter)``: float32 values, or remainders beside the weights."""
        for group in self.groups:
            group.table = None  # of the state before
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
                store.companions[index].copy_(local_tensor(remainder))
                store.follow_edits()

    def take_moments(self, param: Tensor, coded: Mapping[str, Tensor]) -> None:
        """Take codes of a state dict: as they are if they are of this optimizer's format, else as float32 values."""
        keep = self.config.moments == "8bit" and id(param) in self.place_of and moments.is_our_format(coded, param)
        entry = {name: value.to(param.device) for name, value in coded.items()}
        self.live().state[param].update(entry if keep else moments.decoded_entry(entry, param))


def _is_whole(remainder: Tensor) -> bool:
    """Return whether a remainder of a state dict has 16 bits; one of an earlier form has 8."""
    return remainder.dtype == torch.int16


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
        same = store.params[index] is parameter and parameter.dtype == store.dtype
        if same and parameter.shape == store.masters[index].shape:  # a program that prunes gives another
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
