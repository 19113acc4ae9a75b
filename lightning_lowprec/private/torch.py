"""Private names of PyTorch that this package uses."""

from __future__ import annotations

import importlib
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_FSDP: Final = "torch.distributed.fsdp._fully_shard"
FSDP2_NAMES: Final = (
    "torch._foreach_norm",
    "torch._functorch.config.enable_autograd_cache",
    "torch.Tensor._make_wrapper_subclass",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    f"{_FSDP}._fsdp_common.TrainingState.FORWARD",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._training_state",
    f"{_FSDP}._fsdp_state.FSDPState._register_pre_backward_hook",
)
"""The names that 'fsdp2' needs; :func:`check_fsdp2_names` checks them when the strategy is set up."""
PARAM_GROUPS: Final = ("_fsdp_param_groups", "_fsdp_param_group")
"""Attributes of FSDPState: torch 2.11 has one group of parameters per module, later versions have a list."""

OTHER_NAMES: Final = ("torch.distributed.fsdp.wrap.ModuleWrapPolicy._module_classes",)


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return [*(name for name in OTHER_NAMES if not _exists(name)), *_missing_for_fsdp2()]


# ---- FSDP2


def check_fsdp2_names() -> None:
    """Raise ImportError if the installed PyTorch lacks a private name that 'fsdp2' needs."""
    missing = _missing_for_fsdp2()
    if missing:
        raise ImportError(
            f"torch {torch.__version__} has moved {', '.join(missing)}, so 'fsdp2' does not run on it. Install a torch"
            " that this version of lightning_lowprec supports."
        )


def _missing_for_fsdp2() -> list[str]:
    missing = [name for name in FSDP2_NAMES if not _exists(name)]
    state = f"{_FSDP}._fsdp_state.FSDPState"
    if not any(_exists(f"{state}.{name}") for name in PARAM_GROUPS):
        missing.append(f"{state}.{PARAM_GROUPS[0]}")
    return missing


def _exists(name: str) -> bool:
    """Return whether ``name`` is there: a module, an attribute, or an attribute that a class sets in ``__init__``."""
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif isinstance(value, type):
            code = getattr(getattr(value, "__init__", None), "__code__", None)
            return part in getattr(code, "co_names", ())
        else:
            try:
                value = importlib.import_module(path)
            except ImportError:
                return False
    return True


def keep_in_forward(module: nn.Module) -> None:
    """Let FSDP2 believe that the forward pass of ``module`` is still under way."""
    state: Any = cast(FSDPModule, module)._get_fsdp_state()
    for group in getattr(state, PARAM_GROUPS[0], None) or [getattr(state, PARAM_GROUPS[1])]:
        if group is not None:
            group._training_state = type(group._training_state).FORWARD


def prepare_backward_from(module: nn.Module, loss: Tensor) -> None:
    """Let FSDP2 prepare the backward pass of ``module`` when the gradient of ``loss`` arrives."""
    state: Any = cast(FSDPModule, module)._get_fsdp_state()
    state._register_pre_backward_hook(loss)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard that this rank has of a DTensor, or ``tensor`` itself if it is none.

    This is the stored object. ``DTensor.to_local()`` returns a view of it where gradients are recorded.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_tensor(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the shape and placements of ``like``, of which this rank has the shard ``local``."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def make_wrapper_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """Return an instance of ``cls`` without memory, with the shape, strides, dtype and device of ``like``."""
    make: Any = Tensor._make_wrapper_subclass
    return make(
        cls,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        layout=like.layout,
        device=like.device,
        requires_grad=like.requires_grad,
    )


def largest_values(tensors: list[Tensor]) -> list[Tensor]:
    """Return max(|x|) of every tensor by one multi-tensor operation; for DTensors as partial values of the ranks."""
    return list(torch._foreach_norm(tensors, ord=torch.inf))


def disable_autograd_cache() -> None:
    """Turn off the cache of compiled graphs that torch keeps across compilations."""
    torch._functorch.config.enable_autograd_cache = False


def classes_of(policy: Any, remedy: str) -> set[type[nn.Module]]:
    """Return the classes that a ``ModuleWrapPolicy`` of FSDP1 wraps.

    Raises:
        ImportError: the installed PyTorch stores the classes under another name; ``remedy`` ends the message.
    """
    classes: set[type[nn.Module]] | None = getattr(policy, "_module_classes", None)
    if classes is None:
        raise ImportError(f"torch {torch.__version__} has moved the classes of ModuleWrapPolicy; {remedy}.")
    return classes
