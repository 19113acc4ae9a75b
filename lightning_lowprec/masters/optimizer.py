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
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_lowprec.checks import abstract
from lightning_lowprec.masters import moments
from lightning_lowprec.masters import step as steps
from lightning_lowprec.masters.config import Kept, MasterConfig
from lightning_lowprec.masters.registry import MasterRegistry, registry_of
from lightning_lowprec.masters.stores import ROUNDING_STEP, steps_of
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MASTERS, check, version_of
from lightning_lowprec.private.torch_optimizers import check_step, refuse_copies

SEVERAL_EVALUATIONS: Final = (
    "{} evaluates its closure where it has moved the weights, and half-precision weights follow their float32 masters"
    " after a step only. Use a precision with float32 weights (`bf16-mixed`, `32-true`, or in FP8 `fp8-hybrid`), or"
    " `torch.optim.AdamW`."
)
"""The error for an optimizer such as LBFGS."""
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
    steps.move_grads(registry)


def show_master_grads(optimizer: Optimizer) -> None:
    """Show moved gradients at the parameters too, until the next ``step`` or ``zero_grad``; edits reach the step."""
    if (registry := registry_of(optimizer)) is not None:
        steps.show_grads(registry)


def main_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer updates, for clipping: masters, and the parameters without a master.

    After the next ``step`` or ``zero_grad``, a master of the remainder or stochastic form has no memory.
    """
    registry = registry_of(optimizer)
    if registry is not None:
        steps.load(registry)
    for param in parameters_of(optimizer):
        yield param if registry is None else registry.master_of.get(id(param), param)


def held_masters(optimizer: Optimizer) -> list[Tensor]:
    """Return the masters, to look at their ``grad``; their values may have no memory. Empty without masters."""
    registry = registry_of(optimizer)
    return [] if registry is None else list(registry.master_of.values())


# ---- all masters at once


@contextmanager
def stepping(registry: MasterRegistry) -> Iterator[None]:
    """Show the optimizer all masters; at the end, also after an error, save them and drop the moved gradients.

    Raises RuntimeError if parameters got gradients meanwhile: from weights that had not followed their masters.
    """
    steps.load(registry)
    steps.move_grads(registry)
    try:
        with steps.loaded(registry, registry.live(), registry.stores), showing_masters(registry):
            yield
    finally:
        if registry.rounds:
            registry.live().param_groups[0][ROUNDING_STEP] = steps_of(registry.live()) + 1
    if any(p.grad is not None for p, _ in registry.pairs()):
        raise RuntimeError(SEVERAL_EVALUATIONS.format(registry.plain.__name__))


@contextmanager
def changing(registry: MasterRegistry, method: str, reads_gradients: bool) -> Iterator[None]:
    """Show the optimizer all masters beside its step; at the end, also after an error, save them.

    Moved gradients stay, unless the optimizer's ``method`` reads them. Raises TypeError, which names the method,
    where weights have no masters between steps.
    """
    if registry.config.form == "stochastic":
        raise TypeError(
            f"`{method}` moves the weights between steps, and stochastic rounding would round them once more each"
            " time. Use a precision with float32 masters (`bf16-master`, `bf16-remainder`) or float32 weights."
        )
    if registry.in_step:  # called by the step
        yield
    elif reads_gradients:
        with stepping(registry):
            yield
    else:
        steps.hide_grads(registry)
        steps.load(registry)
        grads = [(master, master.grad) for master in registry.master_of.values()]
        try:
            with steps.loaded(registry, registry.live(), registry.stores), showing_masters(registry):
                yield
        finally:
            for master, grad in grads:
                master.grad = grad


def evaluated_once(registry: MasterRegistry, result: object) -> Callable[[], object]:
    """Return a closure for the optimizer that returns ``result`` once, before a master has changed."""
    versions: list[int] = [version_of(store.flat) for store in registry.stores]

    def closure() -> Any:
        if versions != [version_of(store.flat) for store in registry.stores]:
            raise RuntimeError(SEVERAL_EVALUATIONS.format(registry.plain.__name__))
        versions.append(-1)  # so that a second call raises
        return result

    return closure


@contextmanager
def showing_masters(registry: MasterRegistry) -> Iterator[None]:
    """Put masters in the place of parameters, in the optimizer's groups and state."""
    steps.follow(registry, registry.live())
    _replace(registry, registry.master_of)
    try:
        yield
    finally:
        _replace(registry, registry.param_of)


def _replace(registry: MasterRegistry, other: Mapping[int, Tensor]) -> None:
    optimizer = registry.live()
    for group in optimizer.param_groups:
        group["params"][:] = [other.get(id(p), p) for p in group["params"]]  # in place: others may keep the list
    items = [(other.get(id(key), key), entry) for key, entry in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(items)


@abstract
class MasterOptimizer(Optimizer):
    """The methods of an optimizer with masters: :func:`add_masters` puts them into a class derived from its own.

    This class itself is no base of that class. Python lets an object change to a class derived from its own alone, but
    of two bases the first one decides how objects lie in memory, and not all optimizers have torch's as their first.
    """

    _masters: MasterRegistry

    step = steps.step

    def _step_together(self, first: Any, args: Any, kwargs: Any) -> Any:
        """Step all masters by the optimizer's own code; ``first`` has what the closure returned, if there is one."""
        with stepping(self._masters):
            if first is not None:
                args = (evaluated_once(self._masters, first[0]), *args)
            return self._masters.plain.step(self, *args, **kwargs)

    zero_grad = steps.zero_grad

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Also make masters of the new parameters."""
        self._masters.plain.add_param_group(self, param_group)
        self._masters.add_missing({})

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state dict, with a ``master_param`` for every parameter that has a master."""
        registry = self._masters
        with showing_masters(registry):
            state_dict = registry.plain.state_dict(self)
        name, values = registry.saved()
        state = {key: moments.guarded(entry) for key, entry in state_dict["state"].items()}
        for key, param in moments.params_by_key(self, state_dict).items():
            if id(param) in values:
                state[key] = {**state.get(key, {}), name: values[id(param)]}
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a state dict of any form of masters, or of a plain optimizer: masters follow changed weights."""
        registry = self._masters
        plain, codes, masters = moments.taken_out(state_dict, moments.MASTER_PARAM, moments.MASTER_REMAINDER)
        with showing_masters(registry):
            registry.plain.load_state_dict(self, plain)
        params = moments.params_by_key(self, state_dict)
        values, remainders = (
            {id(params[key]): entry[name] for key, entry in masters.items() if name in entry}
            for name in (moments.MASTER_PARAM, moments.MASTER_REMAINDER)
        )
        registry.take(values, remainders)
        for key, coded in codes.items():
            if coded:
                registry.take_moments(params[key], coded)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the plain optimizer, the configuration and the masters' values."""
        registry = self._masters
        values = registry.values()
        places = {id(p): i for i, p in enumerate(registry.params())}
        state: Any = self.__getstate__()
        state = {**state, "state": moments.for_pickle(state["state"])}
        return _rebuild, (registry.plain, state, registry.config, {places[k]: v for k, v in values.items()})


def _rebuild(plain: type[T], state: dict[str, Any], config: MasterConfig, values: dict[int, Tensor]) -> T:
    optimizer = plain.__new__(plain)
    optimizer.__setstate__({**state, "state": defaultdict(dict, moments.for_pickle(state["state"], undo=True))})
    params = parameters_of(optimizer)
    return add_masters(optimizer, config, values={id(params[i]): value for i, value in values.items()})


@functools.cache
def _master_class(plain: type[object]) -> type[Any]:
    methods = {name: each for name, each in vars(MasterOptimizer).items() if callable(each)}
    moves = {name: _on_masters(getattr(plain, name), name) for name in _MOVES if hasattr(plain, name)}
    return type(plain.__name__, (plain,), {"__doc__": plain.__doc__, **methods, **moves})


_MOVES: Final = {"train": False, "eval": False, "first_step": True, "second_step": True}
"""Methods beside ``step`` that change weights: those of schedule-free optimizers, and of SAM, which read gradients."""


def _on_masters(move: Callable[..., object], name: str) -> Callable[..., object]:
    """Return a method of an optimizer that sees masters."""

    @functools.wraps(move)
    def moved(self: MasterOptimizer, *args: object, **kwargs: object) -> Any:
        with changing(self._masters, f"{type(self).__name__}.{name}", _MOVES[name]):
            return move(self, *args, **kwargs)

    return moved
