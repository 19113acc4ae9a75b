"""float32 master weights for any torch optimizer, by changing the optimizer's class in place.

    optimizer = add_masters(torch.optim.AdamW(model.parameters()), "remainder")     # model in bf16
    loss.backward()
    move_grads_to_masters(optimizer, inv_scale=1 / scale)                            # optional: step does it
    torch.nn.utils.clip_grad_norm_(main_params(optimizer), 1.0)              # float32 gradients
    optimizer.step()

Outside, ``param_groups`` and ``state`` show the model's parameters: ``zero_grad``, schedulers and checkpoint tools work
as they do on any optimizer. Inside ``step``, ``state_dict`` and ``load_state_dict`` they show the masters, so the
optimizer's own code, foreach or fused, updates float32 values with float32 gradients, and torch's own loading casts the
state to float32. Step hooks run inside: they see masters. float32 parameters are their own masters.

State dicts have one more tensor per half-precision parameter, ``master_param`` (float32; none in stochastic form, where
the weights are all). One of any form loads into any other, and without the key (:func:`without_masters`) into the plain
optimizer of a float32 model; one of a plain optimizer loads here: its masters are the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.masters.config import MasterConfig, MasterForm
from lightning_lowprec.masters.registry import MasterRegistry

T = TypeVar("T", bound=Optimizer)
MASTER_PARAM: Final = "master_param"  # the name that Megatron's and NeMo's checkpoints use


def add_masters(
    optimizer: T, store: MasterForm | MasterConfig = "fp32", *, values: Mapping[int, Tensor] | None = None
) -> T:
    """Give ``optimizer`` float32 masters of its half-precision parameters, in place.

    A second call makes masters of parameters that have become half precision since.

    Args:
        optimizer: any torch optimizer, before or after its first step, with or without a scheduler.
        store: where the masters live between steps, see :mod:`~lightning_lowprec.masters.stores`.
        values: float32 weights by ``id(parameter)`` from before a cast
            (:func:`~lightning_lowprec.masters.half_weights.cast_parameters`), for masters that lose nothing by it.

    Returns:
        ``optimizer`` itself, now also an instance of :class:`MasterOptimizer`.

    Raises:
        ValueError: an unknown store, or one that cannot hold masters of a parameter's dtype.
        TypeError: an optimizer that steps another one inside (ZeroRedundancyOptimizer).
        RuntimeError: wrapped with another store already; or somebody replaced ``optimizer.step``.
    """
    config = MasterConfig.of(store)
    if isinstance(optimizer, MasterOptimizer):
        if optimizer._masters.config != config:
            raise RuntimeError(f"the optimizer already has masters by {optimizer._masters.config}, asked for {config}.")
        optimizer._masters.adopt(values or {})
        return optimizer
    _check_kind(optimizer)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the instance attribute `step` of this {type(optimizer).__name__} hides its class, which master weights"
            " change. Wrap the optimizer before whatever replaces its `step`."
        )
    book = MasterRegistry(config, optimizer, values or {})
    vars(optimizer).pop("step", None)  # a scheduler's, which only notes that `step` was called: ours notes it too
    plain: Any = type(optimizer)
    optimizer.__class__ = _master_class(plain)
    vars(optimizer)["_masters"] = book
    return optimizer


def _check_kind(optimizer: Optimizer) -> None:
    if isinstance(getattr(optimizer, "optim", None), Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} steps another optimizer inside, which would not see the masters; use that one"
            " directly, or a precision with float32 weights."
        )


def has_masters(optimizer: Optimizer) -> bool:
    """Whether :func:`add_masters` was applied to ``optimizer``."""
    return isinstance(optimizer, MasterOptimizer)


def move_grads_to_masters(optimizer: Optimizer, inv_scale: float | Tensor = 1.0) -> None:
    """Move the gradients to the masters, as float32 and times ``inv_scale``; a second call finds nothing to move.

    The parameters' own gradients become None. What a later backward leaves there is added at the next call, so calling
    this after every micro-batch accumulates in float32. So does ``parameter.grad_dtype = torch.float32`` alone; such
    gradients are handed over, not copied. Gradients of float32 parameters stay where they are and are multiplied in
    place, once per step. ``step`` and ``zero_grad`` drop the moved gradients: after a skipped step, call
    ``optimizer.zero_grad()``.

    Args:
        optimizer: a wrapped one.
        inv_scale: the reciprocal of the loss scale.

    Raises:
        TypeError: ``optimizer`` is not wrapped.
    """
    _book(optimizer).move_grads_to_masters(inv_scale)


def main_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """What the optimizer updates, for clipping: masters, and the parameters that have none.

    Their values may be read until the next ``step`` or ``zero_grad``; after it a master of the remainder or stochastic
    form has no memory.
    """
    masters = {}
    if isinstance(optimizer, MasterOptimizer):
        optimizer._masters.load()
        masters = optimizer._masters.master_of
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield masters.get(id(param), param)


def held_masters(optimizer: Optimizer) -> list[Tensor]:
    """The masters of a wrapped optimizer, for their ``grad``: values may have no memory. Of any other, none."""
    return list(optimizer._masters.master_of.values()) if isinstance(optimizer, MasterOptimizer) else []


def drop_grads(optimizer: Optimizer) -> None:
    """Forget gradients that were moved to the masters, as after a step; for a step that is skipped."""
    if isinstance(optimizer, MasterOptimizer):
        optimizer._masters.drop_grads()


@contextmanager
def expose_master_grads(optimizer: Optimizer) -> Iterator[None]:
    """Show the masters' float32 gradients as ``grad`` of the parameters, for hooks that look at or edit them.

    An edit in place, or another tensor assigned, is what the optimizer gets.
    """
    pairs = list(optimizer._masters.pairs()) if isinstance(optimizer, MasterOptimizer) else []
    shown = [(p, m, p.grad_dtype) for p, m in pairs if m.grad is not None and p.grad is None]
    for param, master, _ in shown:
        param.grad_dtype = torch.float32
        param.grad = master.grad
    try:
        yield
    finally:
        for param, master, grad_dtype in shown:
            master.grad, param.grad = param.grad, None
            param.grad_dtype = grad_dtype


def refresh_masters(optimizer: Optimizer, values: Mapping[int, Tensor] | None = None) -> None:
    """Make the masters follow the parameters now.

    Edits of a parameter are noticed by themselves, also loading a checkpoint; in-place edits of ``parameter.data`` are
    not, and need this. Masters that still round to their parameter stay (in remainder form they become the parameter).

    Args:
        optimizer: a wrapped one.
        values: float32 weights by ``id(parameter)``, which become the masters where they round to the parameter.

    Raises:
        TypeError: ``optimizer`` is not wrapped.
    """
    _book(optimizer).refresh(values)


def stored_masters(optimizer: Optimizer) -> list[Tensor]:
    """What has memory of the masters between steps, flat: float32, or int16 remainders; nothing if not wrapped."""
    book = vars(optimizer).get("_masters")
    kept = [] if book is None else [tensor for store in book.stores() for tensor in store.at_rest()]
    return [tensor for tensor in kept if tensor.untyped_storage().nbytes()]


def without_masters(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy of an optimizer's state dict for the plain optimizer of the same class."""
    state = {
        key: {k: v for k, v in entry.items() if k != MASTER_PARAM} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": {key: entry for key, entry in state.items() if entry != {}}}


class MasterOptimizer(Optimizer):
    """What :func:`add_masters` puts in front of an optimizer's class; never instantiated by itself."""

    _masters: MasterRegistry
    _incoming: dict[int, Tensor]  # within load_state_dict: masters by id(parameter)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, on the masters."""
        self._opt_called = True  # read by schedulers
        book = self._masters
        if closure is not None:  # the first evaluation comes before any master is loaded: activations need the memory
            with torch.enable_grad():
                args = (self._evaluation(closure, closure()), *args)
        book.move_grads_to_masters(1.0)
        with book.stepping(), book.inside():
            return super().step(*args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it once more, and hooks would run twice
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _evaluation(self, closure: Callable[[], Any], first: Any) -> Callable[[], Any]:
        """``closure`` as the optimizer may call it: the model sees its weights, the optimizer float32 gradients.

        The first call returns ``first``, unless the optimizer has moved the masters before it.
        """
        book = self._masters

        def evaluate() -> Any:
            if book.first_evaluation_holds():
                return first
            with book.outside():
                book.before_evaluation()
                result = closure()
            book.move_grads_to_masters(1.0)
            return result

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop gradients that were moved to the masters."""
        super().zero_grad(set_to_none)
        self._masters.drop_grads()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also make masters of the new parameters."""
        super().add_param_group(param_group)
        self._masters.adopt({})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict, with a ``master_param`` in the entry of every parameter that has one."""
        book = self._masters
        with book.inside():
            state_dict = super().state_dict()
        values = book.values()
        state = dict(state_dict["state"])
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], packed["params"], strict=True):
                if id(param) in values:
                    state[key] = {**state.get(key, {}), MASTER_PARAM: values[id(param)]}
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of any form of masters, or of a plain optimizer: its masters are the weights."""
        book = self._masters
        with book.inside():
            super().load_state_dict(state_dict)
        book.set_values({key: value.clone() for key, value in self._incoming.items()})  # they may be our own, live
        self._incoming = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch's ``load_state_dict``: take the masters out, which Adam would mistake for its own state."""
        entries = state["state"]
        held = [(key, entry.pop(MASTER_PARAM)) for key, entry in entries.items() if _has_master(entry)]
        for key, _ in held:
            if not entries[key]:
                del entries[key]
        self._incoming = {id(self._masters.param_of.get(id(key), key)): value for key, value in held}
        super().__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the plain optimizer, the configuration and the masters' values."""
        book = self._masters
        values = book.values()
        held = {id(p): i for i, p in enumerate(book.params())}
        plain = type(self).__mro__[2]
        return _rebuild, (plain, self.__getstate__(), book.config, {held[k]: v.clone() for k, v in values.items()})


def _rebuild(plain: type[T], state: dict[str, Any], config: MasterConfig, values: dict[int, Tensor]) -> T:
    optimizer = plain.__new__(plain)
    optimizer.__setstate__(state)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return add_masters(optimizer, config, values={id(params[i]): value for i, value in values.items()})


def _has_master(entry: Any) -> bool:
    return isinstance(entry, dict) and MASTER_PARAM in entry


@functools.cache
def _master_class(plain: type[Any]) -> type[Any]:
    return type(plain.__name__, (MasterOptimizer, plain), {"__doc__": plain.__doc__})


def _book(optimizer: Optimizer) -> MasterRegistry:
    if not isinstance(optimizer, MasterOptimizer):
        raise TypeError(
            f"expected an optimizer with masters, got {type(optimizer).__name__}. Call `add_masters` on it first."
        )
    return optimizer._masters
