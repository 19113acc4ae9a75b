"""Private and undocumented names of Transformer Engine (2.20) that this package uses.

Transformer Engine is imported inside the functions. :func:`moved` also looks for names that our classes override.
"""

import functools
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.extras import INSTALL
from lightning_lowprec.private import torch as torch_names
from lightning_lowprec.private.names import missing

_MANAGER: Final = "quantization.FP8GlobalStateManager"
_NAMES: Final = {
    "Linear": ("_get_weight_tensors",),
    "Linear()": (
        *("_fp8_workspaces", "fp8_initialized", "fp8_meta", "fp8_meta_tensors_initialized", "quantizers"),
        *("_is_fsdp2", "param_init_meta", "activation_dtype", "fp8", "scaling_bwd"),
    ),
    "LayerNorm()": ("zero_centered_gamma",),
    "RMSNorm()": ("zero_centered_gamma",),
    "distributed": ("_get_module_fsdp_state",),
    "distributed._get_module_fsdp_state()": ("_te_cached_parent_fsdp_state",),
    "export": ("is_in_onnx_export_mode",),
    "module.base.TransformerEngineBaseModule": ("init_fp8_metadata",),
    "quantization": ("DelayedScalingRecipeState",),
    _MANAGER: (
        *("add_fp8_tensors_to_global_buffer", "get_buffer_info", "is_fp8_enabled", "reduce_and_update_fp8_tensors"),
        "split_key_in_buffer",
    ),
    f"{_MANAGER}()": ("global_fp8_buffer_pos_fwd_recompute",),
    f"{_MANAGER}.quantization_state": (
        *("autocast_depth", "global_amax_buffer", "global_scale_buffer", "is_first_fp8_module"),
    ),
}
"""By a part of ``transformer_engine.pytorch``: the names that this package uses, in the words of :func:`missing`."""

SHARDING_CACHES: Final = ("_is_fsdp2", "_te_cached_parent_fsdp_state")
"""Attributes in which a layer keeps, from its first forward on, whether FSDP2 gathers its weight."""
SET_BY_FORWARD: Final = (
    "activation_dtype",
    "allow_different_data_and_param_types",
    "forwarded_at_least_once",
    "fp8_parameters",
    *SHARDING_CACHES,
)
"""Attributes that a layer gets in its forward, not in its constructor."""
_META_KEYS: Final = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


def moved() -> list[str]:
    """Return the private names that the installed Transformer Engine no longer has; [] without Transformer Engine."""
    if find_spec("transformer_engine") is None:
        return []
    return missing(f"transformer_engine.pytorch.{owner}.{name}" for owner, names in _NAMES.items() for name in names)


@functools.cache
def check_names() -> None:
    """Raise ImportError if Transformer Engine or torch has moved a private name that this package uses for FP8TE."""
    torch_names.check(torch_names.TRANSFORMER_ENGINE)
    if lost := moved():
        raise ImportError(
            f"Transformer Engine {version('transformer_engine')} has no {', '.join(lost)} (used by lightning-lowprec)."
            f" Install a version that has: `{INSTALL['transformer_engine']}`.",
            name="transformer_engine",
        )


@functools.cache
def manager() -> Any:
    """Return Transformer Engine's ``FP8GlobalStateManager``, the state of the process."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def scale_state(layer: Any, mode: str) -> Any:
    """Return a layer's ``DelayedScalingRecipeState`` (``scale`` and ``amax_history``) for a mode, or None."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    state = layer.fp8_meta.get(_META_KEYS[mode])
    return state if isinstance(state, DelayedScalingRecipeState) else None


def make_scale_state(layer: Any, mode: str, recipe: object, count: int, device: torch.device | None) -> Any:
    """Give a layer that has not run yet a ``DelayedScalingRecipeState`` for ``count`` tensors, and return the state."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    state = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=count, device=device)
    layer.fp8_meta[_META_KEYS[mode]] = state
    return state


def register_scales(layers: Iterable[object]) -> None:
    """Make the scales of every ``te.Linear``, and register them; other layers do so at their first forward."""
    from transformer_engine.pytorch import Linear

    for layer in layers:
        if isinstance(layer, Linear):
            layer.init_fp8_metadata(num_gemms=1)
            manager().add_fp8_tensors_to_global_buffer(layer.fp8_meta)


def amax_of_this_step(*, forward: bool) -> list[list[Tensor]]:
    """Return the newest amax of all registered layers: of inputs and weights, or else of gradients."""
    buffers = manager().quantization_state.global_amax_buffer
    return [rows for key, rows in buffers.items() if rows and manager().split_key_in_buffer(key)[0] == forward]


def count_registered() -> int:
    """Return how many layers' scales are registered, forward and backward, in the whole process."""
    return sum(map(len, manager().quantization_state.global_scale_buffer.values()))


def buffer_places() -> set[str]:
    """Return the keys in ``fp8_meta`` of a layer's places in buffers of the process: of amax, and of recomputation."""
    return {manager().get_buffer_info(), "global_fp8_buffer_pos_fwd_recompute"}


def copied_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes that a copy of ``layer`` needs in the place of the layer's own.

    The copy has the same scales, and registers them at its first forward, as it would never renew them otherwise.
    """
    return {
        "fp8_meta": {key: value for key, value in layer.fp8_meta.items() if key not in buffer_places()},
        "quantizers": {"scaling_fwd": [], "scaling_bwd": []},
        "fp8_initialized": False,
        "fp8_meta_tensors_initialized": False,
        "_fp8_workspaces": {},
    }
