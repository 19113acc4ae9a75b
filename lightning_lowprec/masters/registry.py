"""The masters of one optimizer: their stores, their gradients, and the exchange of parameters and masters."""

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

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.moments import StochasticMoments
from lightning_lowprec.masters.stores import Fp32Store, RemainderStore, StochasticStore, Store
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import copy_all_, multiply_all, multiply_all_, tree_map_only

ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along
_numbers = itertools.count()
_registries: weakref.WeakValueDictionary[int, MasterRegistry] = weakref.WeakValueDictionary()
"""Every registry that still exists, in the order in which they were made."""
_UNSCALED: Final = "_lowprec_unscaled"  # an attribute of the gradient itself, so a new gradient does not have it


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
        self.stores: list[Store] = []  # one per device and dtype of the parameters
        self._moments = StochasticMoments(config.seed) if config.moments == "stochastic" else None
        self._stepping = False
        self._shown: dict[int, torch.dtype | None] = {}  # by id(parameter): `grad_dtype` before `show_grads`
        self.add_missing(values)
        if config.form == "stochastic":
            optimizer.param_groups[0].setdefault(ROUNDING_STEP, 0)
        _registries[next(_numbers)] = self

    # ---- membership

    def params(self) -> list[Tensor]:
        """Return the tensors in the optimizer's groups, in order."""
        return parameters_of(self._live())

    def add_missing(self, values: Mapping[int, Tensor]) -> None:
        """Make masters of the half-precision parameters that have none yet, one store per device and dtype."""
        new: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for p in self.params():
            if p.dtype in HALF_DTYPES and id(p) not in self.master_of and not is_lazy(p):
                new.setdefault((p.device, p.dtype), {})[id(p)] = p
        state = self._live().state
        for members in new.values():
            store = self._new_store(list(members.values()), values)
            self.stores.append(store)
            for p, master in zip(store.params, store.masters, strict=True):
                self.master_of[id(p)], self.param_of[id(master)] = master.requires_grad_(), p
                if self._moments is None and p in state:  # made before there were masters, in the parameter's dtype
                    state[p] = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF_DTYPES else t, state[p])

    def _new_store(self, params: list[Tensor], values: Mapping[int, Tensor]) -> Store:
        if self.config.form == "stochastic":
            start = sum(store.buffer.flat.numel() for store in self.stores)
            return StochasticStore(params, values, seed=self.config.seed, start=start)
        return Fp32Store(params, values) if self.config.form == "fp32" else RemainderStore(params, values)

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
        if self.config.form == "stochastic":
            return {}
        return {id(p): value for store in self.stores for p, value in zip(store.params, store.values(), strict=True)}

    def refresh(self, values: Mapping[int, Tensor] | None) -> None:
        """Follow the parameters, or take ``values`` where they round to their parameters.

        A parameter that is not among the ``values`` becomes its own master.
        """
        for store in self.stores:
            store.refresh() if values is None else store.set_values(values)

    # ---- gradients

    def move_grads(self, inv_scale: float | Tensor) -> None:
        """Load masters, move gradients to them, and unscale the gradients of parameters without a master."""
        self._hide_grads()
        self.add_missing({})
        if any(p.grad is not None for p in self.param_of.values()):
            self.load()
        for store in self.stores:
            _move_grads(store.params, store.masters, inv_scale)
        _unscale_in_place([p for p in self.params() if id(p) not in self.master_of], inv_scale)

    def show_grads(self) -> None:
        """Make the gradients of the masters the ``grad`` of the parameters too, until the next step or ``zero_grad``.

        Both are one float32 tensor, so the parameters show what clipping does to the masters' gradients, and edits of
        either reach the step.
        """
        for p, master in zip(self.param_of.values(), self.master_of.values(), strict=True):
            if master.grad is not None and p.grad is None:
                self._shown[id(p)] = p.grad_dtype
                p.grad_dtype = None  # any
                p.grad = master.grad

    def _hide_grads(self) -> None:
        """Undo :meth:`show_grads`; a gradient that was assigned or dropped since then replaces the master's."""
        shown, self._shown = self._shown, {}
        for p, master in zip(self.param_of.values(), self.master_of.values(), strict=True) if shown else ():
            if id(p) in shown:
                grad, p.grad = p.grad, None
                p.grad_dtype = shown[id(p)]
                master.grad = None if grad is None else grad.float()

    def drop_grads(self) -> None:
        """Drop moved gradients; outside of a step, free the masters' memory too."""
        self._hide_grads()
        for store in self.stores:
            for master in store.masters:
                master.grad = None
            if not self._stepping:
                store.release()
        for p in self.params():  # a later backward adds scaled gradients
            if p.grad is not None and hasattr(p.grad, _UNSCALED):
                delattr(p.grad, _UNSCALED)

    # ---- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Load the masters; at the end, also after an error, save them and drop the moved gradients."""
        optimizer = self._live()
        self.load()
        if self._moments is not None:
            self._moments.load(optimizer.state, self.param_of.values())
        self._stepping = True
        try:
            yield
        finally:
            self.drop_grads()  # first: rounding takes temporary memory too
            self._stepping = False
            step = optimizer.param_groups[0].get(ROUNDING_STEP, 0)
            for store in self.stores:
                store.save(step)
            if self._moments is not None:
                self._moments.save(optimizer.state, self.param_of.values(), step)
            if self.config.form == "stochastic":
                optimizer.param_groups[0][ROUNDING_STEP] = step + 1

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
                found |= {id(p): values[id(p)].detach().clone() for p in held}
    return found


@torch.no_grad()
def _move_grads(params: Sequence[Tensor], masters: Sequence[Tensor], inv_scale: float | Tensor) -> None:
    """``master.grad += param.grad.float() * inv_scale; param.grad = None``, in a constant number of calls.

    A dense float32 gradient (``param.grad_dtype``) is handed over to the master without a copy. The masters are loaded.
    ``inv_scale`` multiplies in float32: a half-precision gradient divided by a loss scale may be too small for half.
    """
    found = [(p, m, p.grad) for p, m in zip(params, masters, strict=True) if p.grad is not None]
    half = [(m, grad) for _, m, grad in found if grad.dtype != torch.float32 and not grad.is_sparse]
    copies = multiply_all([m for m, _ in half], 0.0)  # allocates; torch has no multi-tensor empty_like
    copy_all_([local(copy) for copy in copies], [local(grad) for _, grad in half])
    copy_of = {id(m): copy for (m, _), copy in zip(half, copies, strict=True)}
    grads = [copy_of.get(id(m), grad).float() for _, m, grad in found]
    for p, _, _ in found:
        p.grad = None
    _multiply(grads, inv_scale)
    for (_, master, _), grad in zip(found, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad + grad


@torch.no_grad()
def _unscale_in_place(params: Iterable[Tensor], inv_scale: float | Tensor) -> None:
    """Multiply the gradients of parameters without masters, once until the mark is deleted or a new gradient comes."""
    if _is_one(inv_scale):
        return
    grads = [p.grad for p in params if p.grad is not None and not hasattr(p.grad, _UNSCALED)]
    for grad in grads:
        setattr(grad, _UNSCALED, True)
    _multiply(grads, inv_scale)


def _multiply(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    if _is_one(factor):
        return
    multiply_all_([grad for grad in grads if not grad.is_sparse], factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


def _is_one(factor: float | Tensor) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0  # a tensor's value is not read: that waits for the GPU
