"""Private names of PyTorch that this package uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])
_MISSING: Final[dict[str, list[str]]] = {}
"""By the part of this package that needs them: names that the installed PyTorch does not have."""


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return [f"`torch.{name}`, which {part} needs" for part, names in _MISSING.items() for name in names]


def check(part: str) -> None:
    """Raise ImportError if the installed PyTorch lacks a private name that ``part`` needs. Call at set-up."""
    if _MISSING.get(part):
        names = ", ".join(f"`torch.{name}`" for name in _MISSING[part])
        raise ImportError(
            f"{part} needs {names}, which torch {torch.__version__} does not have. Install the torch that this version"
            " of lightning_lowprec was made for, or a newer lightning_lowprec."
        )


def _find(name: str, part: str) -> Any:
    """Return what ``torch.<name>`` refers to. Without such a name: return None, and note the name for ``part``."""
    found: Any = torch
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    if found is None:
        _MISSING.setdefault(part, []).append(name)
    return found


# ---- MS-AMP: tensors of codes and their gradients

MSAMP: Final = "MS-AMP"
make_wrapper_subclass: Any = _find("Tensor._make_wrapper_subclass", MSAMP)
disabled_torch_function: Any = _find("_C._disabled_torch_function_impl", MSAMP)
"""``__torch_function__`` of a tensor subclass that only has ``__torch_dispatch__``."""
scaled_mm: Any = _find("_scaled_mm", MSAMP)
"""FP8 matrix product with one scale per operand; keeps the operands' layout checks of the kernel."""
foreach_copy_: Any = _find("_foreach_copy_", MSAMP)
foreach_norm: Any = _find("_foreach_norm", MSAMP)
ATEN_UNSCALE: Any = _find("ops.aten._amp_foreach_non_finite_check_and_unscale_.default", MSAMP)
"""The operation of gradient scalers."""
ATEN_FOREACH_COPY: Any = _find("ops.aten._foreach_copy_.default", MSAMP)
ATEN_FOREACH_NORM: Any = _find("ops.aten._foreach_norm.Scalar", MSAMP)
ATEN_FOREACH_ZERO: Any = _find("ops.aten._foreach_zero_.default", MSAMP)
ATEN_FOREACH_MULTIPLY: Final[tuple[Any, ...]] = tuple(
    _find(f"ops.aten._foreach_{operation}_.{numbers}", MSAMP)
    for operation in ("mul", "div")
    for numbers in ("Scalar", "ScalarList", "Tensor")
)
_ignore_in_ddp: Any = _find("nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model", MSAMP)


def ignore_in_ddp(model: nn.Module, names: set[str]) -> None:
    """Let DDP leave these parameters of ``model`` alone, and those that it was to leave alone already."""
    _ignore_in_ddp(model, sorted(names.union(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))))


# ---- learning rate schedulers and the step of an optimizer


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody set ``optimizer.step``, other than the wrapper that learning rate schedulers set."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def noted_by_schedulers(step: F) -> F:
    """Decorate the ``step`` of an optimizer's class: tell schedulers about every call, so that they do not wrap it."""

    @functools.wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return noted  # type: ignore[return-value]
