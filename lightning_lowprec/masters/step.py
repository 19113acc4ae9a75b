"""The step of an optimizer with masters, in the order in which it runs.

    backward --> unscale and clip: a factor for the step (GPU), or float32 gradients at the masters, which code may see
    step     --> per group of equal parameters: one kernel, or torch's own step on float32 masters
             --> the new masters become weights --> gradients are dropped, the step is counted

A factor costs one read of the gradients, for their norm. Clipping float32 copies of all gradients reads and writes 14
bytes per parameter more, and the copies take 4 bytes of memory per parameter. The price: ``parameter.grad`` shows the
gradient of the backward, not the clipped one. So gradients stay on GPUs only; on CPUs every step shows what it clips.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_lowprec.masters import kernel_step, moments
from lightning_lowprec.masters.float32_values import NO_PLAIN_STEP
from lightning_lowprec.masters.registry import MasterRegistry, registry_of
from lightning_lowprec.masters.stores import ROUNDING_STEP, Group, Store, steps_of
from lightning_lowprec.numerics import parameters
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.one_pass import kernels_run
from lightning_lowprec.private import torch_optimizers
from lightning_lowprec.private.torch import copy_all_, float32_norms, local_tensor

DEVICES = {"cuda"}
"""Where gradients stay at the parameters until the step."""
_FOLDED: Final = "lowprec_folded"  # an attribute of a gradient that the factor is meant for: a new one does not have it
waiting: WeakSet[MasterRegistry] = WeakSet()
"""Those whose gradients may wait for a step with a factor."""


# ---- unscale and clip, where gradients stay at the parameters: nothing is written, and no memory is needed


def defers(optimizer: Optimizer) -> bool:
    """Return whether gradients may stay at the parameters until the step: on GPUs, if none was moved before."""
    registry = registry_of(optimizer)
    if registry is None or not torch_optimizers.steps_alone(optimizer, registry.plain):
        return False
    follow(registry, optimizer)
    if not registry.stores or any(store.device.type not in DEVICES for store in registry.stores):
        return False
    return all(m.grad is None and (p.grad is None or not p.grad.is_sparse) for p, m in registry.pairs())


@torch.no_grad()
def unscale(optimizer: Optimizer, inv_scale: float) -> Tensor:
    """Multiply the gradients of an optimizer that :func:`defers`; return 1.0 if one was not finite, else 0.0."""
    registry: MasterRegistry = optimizer._masters  # type: ignore[attr-defined]
    grads = _waiting_grads(registry)
    _fold(registry, inv_scale, grads)
    if not grads:
        return torch.zeros(())
    return (~parameters.together(norms(grads, math.inf), math.inf).isfinite()).float()


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of an optimizer that :func:`defers`; return their float32 norm before, over all ranks."""
    registry: MasterRegistry = optimizer._masters  # type: ignore[attr-defined]
    deferred = _waiting_grads(registry)
    others = [p.grad for p in registry.without_master() if p.grad is not None]
    if not deferred and not others:
        return torch.tensor(0.0)
    before = 1.0 if registry.factor is None else registry.factor
    total = parameters.together(
        [norm * before for norm in norms(deferred, norm_type)] + norms(others, norm_type), norm_type
    )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _fold(registry, factor, deferred)
    parameters.multiply(others, factor)
    return total


def norms(grads: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norms of gradients by device, mesh and placements: tensor parallelism shards over one mesh more."""
    groups = parameters.grouped(
        grads, lambda grad: (grad.device, parameters.mesh_of(grad), getattr(grad, "placements", None))
    )
    return parameters.over_ranks([torch.linalg.vector_norm(float32_norms(group, order), order) for group in groups])


def _fold(registry: MasterRegistry, factor: float | Tensor, grads: Iterable[Tensor]) -> None:
    """Multiply ``grads``, all gradients that stay at the parameters, by ``factor`` when the step reads them."""
    if parameters.is_one(factor):
        return
    registry.factor = factor if registry.factor is None else registry.factor * factor
    waiting.add(registry)
    for grad in grads:
        setattr(grad, _FOLDED, True)


def _waiting_grads(registry: MasterRegistry) -> list[Tensor]:
    """Return the gradients that are at the parameters with masters; the factor is meant for all of them.

    ``model.zero_grad()`` and another backward may have replaced some: the others are multiplied now.
    """
    grads = [p.grad for p, _ in registry.pairs() if p.grad is not None]
    if registry.factor is None:
        return grads
    folded = [grad for grad in grads if hasattr(grad, _FOLDED)]
    if len(folded) < len(grads):
        parameters.multiply(folded, registry.factor)
        for grad in folded:
            delattr(grad, _FOLDED)
        registry.factor = None
    return grads


def load(registry: MasterRegistry) -> None:
    """Give every master its value; follow parameters that were edited, added or moved since the last step."""
    follow(registry, registry.live())
    for store in registry.stores:
        store.load()


def multiply_waiting() -> None:
    """Before a backward: multiply gradients that wait for a step, which the new gradients must not share."""
    while waiting:
        registry = waiting.pop()
        if registry.factor is not None:
            move_grads(registry)


# ---- gradients at the masters, as float32: for code that clips or looks at float32 gradients


def move_grads(registry: MasterRegistry) -> None:
    """Move gradients to the masters."""
    hide_grads(registry)
    follow(registry, registry.live())
    _waiting_grads(registry)
    for store in registry.stores:
        _move(registry, store)
    registry.factor = None


def _move(registry: MasterRegistry, store: Store) -> None:
    """Move the gradients of a store's parameters to its masters, times the factor."""
    masters, grads = [], []
    for p, master in zip(store.params, store.masters, strict=True):
        if p.grad is not None:
            masters.append(master)
            grads.append(p.grad)
            p.grad = None
    grads = _as_float32(store, grads)
    if registry.factor is not None:
        parameters.multiply(grads, registry.factor)
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad + grad


@torch.no_grad()
def _as_float32(store: Store, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 gradients, float32 ones themselves; in few calls if every parameter has a half-precision one."""
    every = len(grads) == len(store.params)
    for grad in grads:
        every &= grad.dtype != torch.float32 and not grad.is_sparse
    if not every:
        return [grad.float() for grad in grads]
    copies = store.tensors_on(torch.empty_like(store.flat))
    copy_all_([*map(local_tensor, copies)], [*map(local_tensor, grads)])
    return copies


def show_grads(registry: MasterRegistry) -> None:
    """Make the masters' gradients the ``grad`` of the parameters too: one tensor, so that edits reach the step."""
    for p, master in registry.pairs():
        if master.grad is not None and p.grad is None:
            registry.shown[id(p)] = p.grad_dtype
            p.grad_dtype = None  # any
            p.grad = master.grad


def hide_grads(registry: MasterRegistry) -> None:
    """Undo :func:`show_grads`; a gradient that was assigned or dropped since then replaces the master's."""
    shown, registry.shown = registry.shown, {}
    for p, master in registry.pairs() if shown else ():
        if id(p) in shown:
            grad, p.grad = p.grad, None
            p.grad_dtype = shown[id(p)]
            master.grad = None if grad is None else grad.float()


def drop_grads(registry: MasterRegistry) -> None:
    """Drop moved gradients; outside of a step, free the masters' memory too."""
    if registry.shown:
        hide_grads(registry)
    registry.factor = None
    for store in registry.stores:
        for master in store.masters:
            master.grad = None
        if not registry.in_step:
            store.release()


# ---- the step: the functions here are methods of the optimizer's class


@torch_optimizers.replaces_step
def step(self: Any, closure: Callable[[], Any] | None = None, *args: object, **kwargs: object) -> Any:
    """Step group by group: in one pass, or by the optimizer's own code on some masters at a time; or on all."""
    registry: MasterRegistry = self._masters
    vars(self)[torch_optimizers.STEPPED] = True
    with torch.enable_grad():  # before any master is loaded: activations need the memory
        first = None if closure is None else closure()
    if args or kwargs or not torch_optimizers.steps_alone(self, registry.plain):
        return self._step_together(None if closure is None else (first,), args, kwargs)
    if registry.shown:
        hide_grads(registry)
    follow(registry, self)
    if registry.factor is not None:
        _waiting_grads(registry)
    try:
        for group in registry.groups:
            _step_group(self, registry, group)
    finally:
        drop_grads(registry)
        if registry.rounds:
            self.param_groups[0][ROUNDING_STEP] = steps_of(self) + 1
        torch_optimizers.Steps.count += 1
    return first


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Also drop gradients that were moved to the masters."""
    self._masters.plain.zero_grad(self, set_to_none)
    drop_grads(self._masters)


def follow(registry: MasterRegistry, optimizer: Optimizer) -> None:
    """Follow parameters that were added, moved or cast since the last step."""
    ids = []
    for options in optimizer.param_groups:
        ids.append([*map(id, options["params"])])
    changed = ids != registry.ids
    for group in registry.groups:
        changed |= group.changed()
    if changed:
        registry.follow_moves()


def _step_group(optimizer: Any, registry: MasterRegistry, group: Group) -> None:
    """Step in one kernel; what the kernel does not know, by torch's own code: the masters of a store at a time."""
    kernel = bool(group.stores) and group.stores[0].device.type in kernel_step.DEVICES
    for store in () if kernel and _step_in_one_pass(optimizer, registry, group) else group.stores:
        if with_gradients((*store.params, *store.masters)):
            if registry.config.moments == "8bit":
                group.table = None  # it holds the codes, which are made anew
            store.load()  # first, because it takes temporary memory
            _move(registry, store)
            with loaded(registry, optimizer, [store]), _showing(optimizer, group, store.params, store.masters):
                registry.plain.step(optimizer)
    if not group.stores and (own := with_gradients(group.params)):
        with _showing(optimizer, group, own, own):
            registry.plain.step(optimizer)


def _step_in_one_pass(optimizer: Any, registry: MasterRegistry, group: Group) -> bool:
    """Step by the kernel; return whether it has stepped all parameters."""
    options = optimizer.param_groups[group.index]
    rule = kernel_step.rule_of(registry.plain, options)
    if rule is None or not kernels_run():
        return False
    steps = steps_of(optimizer)
    for store in group.stores:  # to the state between steps, with one gradient per parameter
        store.settle(steps)
        if with_gradients(store.masters) and with_gradients(store.params):
            _move(registry, store)
    return kernel_step.step_in_one_pass(registry, optimizer, group, rule, steps)


@contextmanager
def _showing(optimizer: Any, group: Group, params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Show the optimizer only ``values``, one per parameter, with the options and the state of the parameters."""
    groups, state, options = optimizer.param_groups, optimizer.state, optimizer.param_groups[group.index]
    of_values: defaultdict[Tensor, object] = defaultdict(dict)
    before, members = options["params"], []
    for p, value in zip(params, values, strict=True):
        if id(p) in group.ids:
            members.append(value)
            if p in state:
                of_values[value] = state[p]
    optimizer.param_groups, optimizer.state, options["params"] = [options], of_values, members
    try:
        yield
    finally:
        after = optimizer.state
        for p, value in zip(params, values, strict=True):
            if value in after:
                state[p] = after.pop(value)
        state.update(after)
        optimizer.param_groups, optimizer.state, options["params"] = groups, state, before


def with_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that have a gradient."""
    found = []
    for t in tensors:
        if t.grad is not None:
            found.append(t)
    return found


@contextmanager
def loaded(registry: MasterRegistry, optimizer: Optimizer, stores: Sequence[Store]) -> Iterator[None]:
    """Make the moments of loaded ``stores`` float32; at the end round masters into weights, and encode moments."""
    coded = registry.config.moments == "8bit"
    for store in stores if coded else ():
        for p in store.params:
            if p in optimizer.state:
                moments.decode_in_place(optimizer.state[p], p)
    registry.in_step = True
    try:
        yield
    finally:
        if registry.shown:
            hide_grads(registry)
        for store in stores:
            for master in store.masters:
                master.grad = None  # first: rounding takes temporary memory too
        registry.in_step = False
        steps = steps_of(optimizer)
        for store in stores:
            store.save(steps)
            if coded:
                moments.encode_state(optimizer.state, store, steps)


@functools.cache
def refuse_plain_steps() -> None:
    """Let optimizers without masters raise RuntimeError from now on where they would step weights that were cast."""

    @torch_optimizers.sees_no_masters
    def check(optimizer: Optimizer, *_: object) -> None:
        if hasattr(optimizer, "_masters") or torch_optimizers.brings_masters(optimizer):
            return
        for p in parameters.parameters_of(optimizer):
            if NO_PLAIN_STEP in vars(p) and p.dtype in HALF_DTYPES and p.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps half-precision weights without their masters. Give it to"
                    " `fabric.setup` or return it from `configure_optimizers`. An optimizer inside of another needs"
                    " float32 weights (`bf16-mixed`, `fp8-hybrid`). After Lightning, `lightning_lowprec.plain(model)`"
                    " makes them."
                )

    register_optimizer_step_pre_hook(check)
