"""Private names of PyTorch that this package uses."""

from __future__ import annotations

from typing import Any, Final

import torch

_AUTOGRAD: Final = ("_C._current_graph_task_id", "_C._autograd._top_saved_tensors_default_hooks")


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return [f"torch.{name}" for name in _AUTOGRAD if _found(name) is None]


def _found(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_in_backward() -> bool:
    """Return whether the caller runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks on all saved tensors are active, as inside a checkpoint that is not reentrant."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def saved_tensors(node: Any) -> tuple[Any, ...]:
    """Return what the node of a ``torch.autograd.Function`` has saved, each with ``register_hooks``; () if unknown."""
    return tuple(getattr(node, "_raw_saved_tensors", ()))
