"""Private names of PyTorch that this package uses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

Tensors = list[Tensor] | tuple[Tensor, ...]

OPTIMIZER_NAMES: Final = (
    "torch._foreach_copy_",
    "torch._foreach_mul",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch.Tensor._version",
    "torch.optim.Optimizer._patch_step_function",
    "torch.nn.Module._apply",
)
"""The names that an optimizer's step needs; :func:`check_optimizer_names` checks them before the first step."""
OTHER_NAMES: Final = (
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.ops.aten.copy_.default._schema",
)


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return [*_missing(OTHER_NAMES), *_missing_for_optimizers()]


def check_optimizer_names(purpose: str) -> None:
    """Raise if a private name is missing that optimizers of this package need in the middle of a step.

    Args:
        purpose: the feature that needs the names, for example "master weights".

    Raises:
        RuntimeError: the installed PyTorch lacks a name.
    """
    missing = _missing_for_optimizers()
    if missing:
        raise RuntimeError(
            f"{purpose}: torch {torch.__version__} no longer has {', '.join(missing)}. Install a torch that this"
            " version of lightning_lowprec supports."
        )


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value is not None


@functools.cache
def _missing_for_optimizers() -> list[str]:
    """Look at a real scheduler too: torch defines the names of its handshake with optimizers nowhere else."""
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    LambdaLR(optimizer, lambda _: 1.0)
    noting_step = optimizer.step
    missing = _missing(OPTIMIZER_NAMES)
    if not hasattr(noting_step, "_wrapped_by_lr_sched"):
        missing.append("optimizer.step._wrapped_by_lr_sched")
    if "_opt_called" not in noting_step.__code__.co_names:
        missing.append("optimizer._opt_called")
    if not hasattr(SGD.step, "hooked"):
        missing.append("torch.optim.Optimizer.step.hooked")
    return missing


# ---- an optimizer's class


def check_step(optimizer: Optimizer, purpose: str) -> None:
    """Raise if ``optimizer.step`` was replaced by anything but a scheduler: a new class would have no effect.

    Raises:
        RuntimeError: the optimizer has an own ``step``.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the instance attribute `step` of this {type(optimizer).__name__} hides its class, which must"
            f" change for {purpose}. Set the optimizer up before anything that replaces its `step`."
        )


def change_class(optimizer: Optimizer, target: type[Any]) -> None:
    """Change the class of an optimizer in place; step hooks and existing schedulers keep working.

    A scheduler replaces ``optimizer.step`` with a function that notes the call and runs the step of the class that
    the optimizer had then. This function replaces the scheduler's function with one that runs the current class's step.
    """
    scheduled = vars(optimizer).pop("step", None) is not None
    optimizer.__class__ = target
    optimizer._patch_step_function()  # gives the step of a new class its hooks
    if scheduled:
        optimizer.step = _note_call(optimizer)  # type: ignore[method-assign]


def _note_call(optimizer: Optimizer) -> Callable[..., Any]:
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        live: Any = reference()
        live._opt_called = True  # schedulers warn if they step before the optimizer
        return type(live).step(live, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


# ---- many tensors in one call


def copy_all_(targets: Tensors, sources: Tensors) -> None:
    """Copy every source into its target, in place."""
    if targets:
        torch._foreach_copy_(targets, sources)


def multiply_all(tensors: Tensors, factor: float) -> list[Tensor]:
    """Return every tensor times ``factor``."""
    return list(torch._foreach_mul(tensors, factor)) if tensors else []


def multiply_all_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply every tensor by ``factor``, in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def largest_absolute_values(tensors: Tensors) -> Tensor:
    """Return the largest absolute value of every tensor, NaN if there is one: (len(tensors),)."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))


def unscale_all_(grads: Tensors, inv_scale: float) -> Tensor:
    """Multiply gradients of one device and dtype, in place; return a scalar above 0 if one of them is not finite."""
    device = grads[0].device
    found_inf = torch.zeros((), device=device)
    factor = torch.full((), inv_scale, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
    return found_inf


# ---- tensors, modules and operations


def version_of(tensor: Tensor) -> int:
    """Return a count that grows with every in-place change of ``tensor``, except through ``tensor.data``."""
    return tensor._version


def reset_shards(module: Module) -> None:
    """Let FSDP2 take the current parameters of ``module`` as its shards."""
    module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def is_batch_norm(module: Module) -> bool:
    """Return whether ``module`` is a batch norm of any dimension, synchronised or not."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operation ``func`` writes to, for a ``__torch_dispatch__``."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_positions(func)]
