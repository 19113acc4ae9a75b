"""Private and undocumented names of Transformer Engine (2.20) that this package uses.

Transformer Engine is imported inside the functions. :func:`moved` also looks for names that our classes override.
"""

import functools
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

from lightning_lowprec.extras import INSTALL, missing
from lightning_lowprec.private import torch as torch_names

_MANAGER: Final = "quantization.FP8GlobalStateManager"
_NAMES: Final = {
    "Linear": ("_get_weight_tensors", "init_fp8_metadata"),
    "Linear()": (
        *("_fp8_workspaces", "fp8_meta", "fp8_meta_tensors_initialized", "scaling_bwd", "param_init_meta"),
        *("activation_dtype", "fp8", "_is_fsdp2"),
    ),
    "distributed._get_module_fsdp_state()": ("_te_cached_parent_fsdp_state",),
    "quantization": ("DelayedScalingRecipeState",),
    _MANAGER: ("add_fp8_tensors_to_global_buffer", "is_fp8_enabled", "reduce_and_update_fp8_tensors"),
    f"{_MANAGER}.quantization_state": ("autocast_depth", "global_scale_buffer", "is_first_fp8_module"),
}
"""By a part of ``transformer_engine.pytorch``: the names that this package uses, in the words of :func:`missing`."""

SHARDING_CACHES: Final = ("_is_fsdp2", "_te_cached_parent_fsdp_state")
"""Attributes in which a layer keeps, from its first forward on, whether FSDP2 gathers its weight."""
SET_BY_FORWARD: Final = (
    *("activation_dtype", "allow_different_data_and_param_types", "forwarded_at_least_once", "fp8_parameters"),
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


def make_scale_state(layer: Any, mode: str, recipe: object, count: int) -> Any:
    """Give a layer that has not run yet a ``DelayedScalingRecipeState`` for ``count`` tensors, and return the state."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    device = next((parameter.device for parameter in layer.parameters()), None)
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


def count_registered() -> int:
    """Return how many layers' scales are registered, forward and backward, in the whole process."""
    return sum(map(len, manager().quantization_state.global_scale_buffer.values()))


def copied_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes that a copy of ``layer`` needs in the place of the layer's own.

    The copy has the same scales. It makes its quantizers and registers its scales at its first forward: a layer without
    a recipe in ``fp8_meta`` has not run yet, and the layer's places in buffers of the process are not in the copy.
    """
    kept = "fp8_checkpoint", "fp8_group", *_META_KEYS.values()
    meta = {key: layer.fp8_meta[key] for key in kept if key in layer.fp8_meta}
    return {"fp8_meta": meta, "fp8_meta_tensors_initialized": False, "_fp8_workspaces": {}}
