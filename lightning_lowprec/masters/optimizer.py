"""Give any torch optimizer float32 master weights, by changing the optimizer's class in place.

    optimizer = add_masters(torch.optim.AdamW(model.parameters()), "remainder")     # model in bf16
    loss.backward()
    move_grads_to_masters(optimizer)                                                # optional: step does it
    torch.nn.utils.clip_grad_norm_(main_params(optimizer), 1.0)                     # float32 gradients
    optimizer.step()

Outside of the optimizer's methods, ``param_groups`` and ``state`` contain the model's parameters: ``zero_grad``,
schedulers and checkpoint tools work as on any optimizer. Inside ``step``, ``state_dict`` and ``load_state_dict`` they
contain the masters. The optimizer's own code, foreach or fused, then updates float32 values with float32 gradients, and
torch's own loading casts the state to float32. Step hooks run inside ``step`` and see masters. float32 parameters are
their own masters.

State dicts have one more tensor per half-precision parameter, ``master_param`` (float32). The stochastic form has none,
because the weights contain everything. A state dict of any form loads into any other form, and without ``master_param``
into the plain optimizer of a float32 model. A state dict of a plain optimizer loads too: masters that do not round to
their weights follow them.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_lowprec.checks import abstract
from lightning_lowprec.conversion.steps import count_step
from lightning_lowprec.masters import moments
from lightning_lowprec.masters.config import Kept, MasterConfig
from lightning_lowprec.masters.kernel_step import step_in_one_pass
from lightning_lowprec.masters.registry import SEVERAL_EVALUATIONS, MasterRegistry, registry_of
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MASTERS, check
from lightning_lowprec.private.torch_optimizers import (
    check_step,
    noted_by_schedulers,
    refuse_copies,
    steps_alone,
    without_own_hooks,
)

T = TypeVar("T", bound=Optimizer)


def add_masters(optimizer: T, store: Kept | MasterConfig = "fp32", *, values: Mapping[int, Tensor] | None = None) -> T:
    """Give ``optimizer`` float32 masters of its half-precision parameters, in place, and return ``optimizer``.

    A second call makes masters of parameters that have become half precision since the first call.

    Args:
        optimizer: any torch optimizer, before or after its first step, with or without a scheduler.
        store: where the masters are between steps, see :mod:`~lightning_lowprec.masters.stores`.
        values: float32 weights by ``id(parameter)`` from before a cast, so that the masters lose nothing.

    Raises:
        ValueError: an unknown store, or one that cannot hold masters of a parameter's dtype.
        TypeError: LBFGS, or an optimizer that steps another one inside (ZeroRedundancyOptimizer, CPUOffloadOptimizer).
        RuntimeError: ``optimizer`` has masters of another form, or its ``step`` was replaced.
    """
    config = MasterConfig.of(store)
    registry = registry_of(optimizer)
    if registry is not None:
        if registry.config != config:
            raise RuntimeError(f"the optimizer already has masters by {registry.config}, asked for {config}.")
        registry.add_missing(values or {})
        return optimizer
    refuse_copies(optimizer, "half-precision weights, whose masters it would not see")
    if isinstance(optimizer, LBFGS):
        raise TypeError(SEVERAL_EVALUATIONS.format("LBFGS"))
    if isinstance(getattr(optimizer, "optim", None), Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} steps another optimizer inside, which would not see the masters; use the other"
            " optimizer directly, or a precision with float32 weights."
        )
    check(MASTERS)
    check_step(optimizer, MASTERS)
    registry = MasterRegistry(config, optimizer, values or {})
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, which calls the old class; the new class needs none
    plain: Any = type(optimizer)
    optimizer.__class__ = _master_class(plain)
    vars(optimizer)["_masters"] = registry
    return optimizer


def remove_masters(optimizer: Optimizer) -> None:
    """Make ``optimizer`` plain again, in place, with float32 state; read masters before (``existing_masters``)."""
    registry = registry_of(optimizer)
    if registry is None:
        return
    optimizer.__class__ = registry.plain
    vars(optimizer).pop("_masters", None)
    for param, entry in optimizer.state.items():
        optimizer.state[param] = moments.decoded_entry(moments.float32_state(entry), param)


def move_grads_to_masters(optimizer: Optimizer) -> None:
    """Move the gradients to the masters, as float32; a second call finds nothing to move.

    The parameters' own gradients become None. The next call adds the gradients of later backwards, so a call after
    every micro-batch accumulates in float32. ``parameter.grad_dtype = torch.float32`` also accumulates in float32; such
    gradients are handed over, not copied. Gradients of float32 parameters stay in place. ``step`` and ``zero_grad``
    drop the moved gradients: after a skipped step, call ``optimizer.zero_grad()``.
    """
    registry = registry_of(optimizer)
    if registry is None:
        raise TypeError(
            f"expected an optimizer with masters, got {type(optimizer).__name__}. Call `add_masters` on it first."
        )
    registry.move_grads()


def show_master_grads(optimizer: Optimizer) -> None:
    """Show moved gradients at the parameters too, until the next ``step`` or ``zero_grad``; edits reach the step."""
    if (registry := registry_of(optimizer)) is not None:
        registry.show_grads()


def main_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer updates, for clipping: masters, and the parameters without a master.

    After the next ``step`` or ``zero_grad``, a master of the remainder or stochastic form has no memory.
    """
    registry = registry_of(optimizer)
    if registry is not None:
        registry.load()
    for param in parameters_of(optimizer):
        yield param if registry is None else registry.master_of.get(id(param), param)


def held_masters(optimizer: Optimizer) -> list[Tensor]:
    """Return the masters, to look at their ``grad``; their values may have no memory. Empty without masters."""
    registry = registry_of(optimizer)
    return [] if registry is None else list(registry.master_of.values())


@abstract
class MasterOptimizer(Optimizer):
    """The methods of an optimizer with masters: :func:`add_masters` puts them into a class derived from its own.

    This class itself is no base of that class. Python lets an object change to a class derived from its own alone, but
    of two bases the first one decides how objects lie in memory, and not all optimizers have torch's as their first.
    """

    _masters: MasterRegistry

    @without_own_hooks
    @noted_by_schedulers
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step in one pass, or by the optimizer's own code on some masters at a time, or on all."""
        registry = self._masters
        with torch.enable_grad():  # before any master is loaded: activations need the memory
            first = None if closure is None else closure()
        if not args and not kwargs and steps_alone(self, registry.plain):
            self._step_apart()
            return first
        with registry.stepping():
            if closure is not None:
                args = (registry.evaluated_once(first), *args)
            return registry.plain.step(self, *args, **kwargs)

    def _step_apart(self) -> None:
        """Step some parameters at a time, so that only their masters and float32 gradients need memory."""
        registry = self._masters
        registry.hide_grads()
        registry.follow_moves()
        registry.deferred_grads()
        try:
            step_in_one_pass(registry)
            for store in registry.stores:
                if any(t.grad is not None for t in (*store.params, *store.masters)):
                    with registry.stepping_only(store):
                        registry.plain.step(self)
            others = [p for p in registry.without_master() if p.grad is not None]
            if others:
                with registry.showing_only(others):
                    registry.plain.step(self)
        finally:
            registry.drop_grads()
            registry.count_step()
            count_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop gradients that were moved to the masters."""
        self._masters.plain.zero_grad(self, set_to_none)
        self._masters.drop_grads()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also make masters of the new parameters."""
        self._masters.plain.add_param_group(self, param_group)
        self._masters.add_missing({})

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state dict, with a ``master_param`` for every parameter that has a master."""
        registry = self._masters
        with registry.showing_masters():
            state_dict = registry.plain.state_dict(self)
        name, values = registry.saved()
        state = {key: moments.guarded(entry) for key, entry in state_dict["state"].items()}
        for key, param in moments.params_by_key(self, state_dict).items():
            if id(param) in values:
                state[key] = {**state.get(key, {}), name: values[id(param)]}
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any form of masters, or of a plain optimizer: masters follow changed weights."""
        registry = self._masters
        plain, codes, masters = moments.taken_out(state_dict, moments.MASTER_PARAM, moments.MASTER_REMAINDER)
        with registry.showing_masters():
            registry.plain.load_state_dict(self, plain)
        params = moments.params_by_key(self, state_dict)
        values, remainders = (
            {id(params[key]): entry[name] for key, entry in masters.items() if name in entry}
            for name in (moments.MASTER_PARAM, moments.MASTER_REMAINDER)
        )
        registry.take({key: value.clone() for key, value in values.items()}, remainders)  # may be our masters' memory
        for key, coded in codes.items():
            if coded:
                registry.take_moments(params[key], coded)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the plain optimizer, the configuration and the masters' values."""
        registry = self._masters
        values = registry.values()
        places = {id(p): i for i, p in enumerate(registry.params())}
        state: Any = self.__getstate__()
        state = {**state, "state": moments.for_pickle(state["state"])}
        return _rebuild, (registry.plain, state, registry.config, {places[k]: v.clone() for k, v in values.items()})


def _rebuild(plain: type[T], state: dict[str, Any], config: MasterConfig, values: dict[int, Tensor]) -> T:
    optimizer = plain.__new__(plain)
    optimizer.__setstate__({**state, "state": defaultdict(dict, moments.for_pickle(state["state"], undo=True))})
    params = parameters_of(optimizer)
    return add_masters(optimizer, config, values={id(params[i]): value for i, value in values.items()})


@functools.cache
def _master_class(plain: type[Any]) -> type[Any]:
    methods = {name: each for name, each in vars(MasterOptimizer).items() if callable(each)}
    moves = {name: _on_masters(getattr(plain, name), name) for name in _MOVES if hasattr(plain, name)}
    return type(plain.__name__, (plain,), {"__doc__": plain.__doc__, **methods, **moves})


_MOVES: Final = {"train": False, "eval": False, "first_step": True, "second_step": True}
"""Methods beside ``step`` that change weights: those of schedule-free optimizers, and of SAM, which read gradients."""


def _on_masters(move: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method of an optimizer that sees masters."""

    @functools.wraps(move)
    def moved(self: MasterOptimizer, *args: Any, **kwargs: Any) -> Any:
        with self._masters.changing(f"{type(self).__name__}.{name}", _MOVES[name]):
            return move(self, *args, **kwargs)

    return moved
