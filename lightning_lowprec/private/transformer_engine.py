"""Private and undocumented names of Transformer Engine (2.20) that this package uses.

Transformer Engine is imported inside the functions. The classes of :mod:`lightning_lowprec.te` that derive from its
layers also override some of its methods and set some of its attributes; :func:`moved` looks for these names as well.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_lowprec.extras import INSTALL

_QUANTIZATION: Final = "transformer_engine.pytorch.quantization"
_MANAGER: Final = "FP8GlobalStateManager"
_OVERRIDDEN: Final = ("pre_first_fuser_forward", "op_forward", "op_backward")
_NAMES: Final = {
    "transformer_engine.pytorch": (
        "Linear._get_weight_tensors",
        *(f"LayerNorm.{method}" for method in _OVERRIDDEN),
        *(f"RMSNorm.{method}" for method in _OVERRIDDEN),
    ),
    "transformer_engine.pytorch.constants": ("FP8FwdTensorIdx.GEMM1_WEIGHT",),
    "transformer_engine.pytorch.distributed": ("_get_module_fsdp_state",),
    "transformer_engine.pytorch.export": ("is_in_onnx_export_mode",),
    "transformer_engine.pytorch.module.base": (
        "TransformerEngineBaseModule.get_quantizer_roles",
        "TransformerEngineBaseModule.init_fp8_metadata",
    ),
    _QUANTIZATION: (
        "DelayedScalingRecipeState",
        "QuantizerRequest",
        "QuantizerRole",
        f"{_MANAGER}.add_fp8_tensors_to_global_buffer",
        f"{_MANAGER}.get_buffer_info",
        f"{_MANAGER}.get_fp8_recipe",
        f"{_MANAGER}.is_fp8_enabled",
        f"{_MANAGER}.quantization_state.autocast_depth",
        f"{_MANAGER}.quantization_state.global_amax_buffer",
        f"{_MANAGER}.quantization_state.is_first_fp8_module",
        f"{_MANAGER}.reduce_and_update_fp8_tensors",
        f"{_MANAGER}.split_key_in_buffer",
    ),
}
_SCALED: Final = ("_fp8_workspaces", "fp8_initialized", "fp8_meta", "fp8_meta_tensors_initialized", "quantizers")
_ATTRIBUTES: Final = (
    ("transformer_engine.pytorch", "Linear", (*_SCALED, "_get_weight_tensors", "_is_fsdp2", "activation_dtype", "fp8")),
    ("transformer_engine.pytorch", "Linear", ("gemm_bias_unfused_add", "param_init_meta", "scaling_bwd")),
    ("transformer_engine.pytorch", "LayerNorm", ("zero_centered_gamma",)),
    ("transformer_engine.pytorch", "RMSNorm", ("zero_centered_gamma",)),
    ("transformer_engine.pytorch", "LayerNormLinear", (*_SCALED, "_is_fsdp2", "param_init_meta")),
    ("transformer_engine.pytorch", "LayerNormMLP", (*_SCALED, "_is_fsdp2", "param_init_meta")),
    ("transformer_engine.pytorch", "GroupedLinear", (*_SCALED, "num_gemms", "param_init_meta")),
    ("transformer_engine.pytorch.distributed", "_get_module_fsdp_state", ("_te_cached_parent_fsdp_state",)),
    (_QUANTIZATION, _MANAGER, ("global_fp8_buffer_pos_fwd_recompute",)),
)
"""Attributes and keys that exist on instances only: names that the code of a class or function must mention."""

SHARDING_CACHES: Final = ("_is_fsdp2", "_te_cached_parent_fsdp_state")
"""Attributes in which a layer keeps, from its first forward on, whether FSDP2 gathers its weight."""
SET_BY_FORWARD: Final = (
    "fp8_parameters",
    "allow_different_data_and_param_types",
    "forwarded_at_least_once",
    *SHARDING_CACHES,
)
"""Attributes that a layer gets in its forward, not in its constructor."""


def moved() -> list[str]:
    """Return the private names that the installed Transformer Engine no longer has, in words.

    The list is empty on supported versions, and without Transformer Engine.
    """
    if find_spec("transformer_engine") is None:
        return []
    lost = [f"{module}.{name}" for module, names in _NAMES.items() for name in names if _found(module, name) is None]
    for module, name, attributes in _ATTRIBUTES:
        mentioned = set(_mentions(_found(module, name)))
        lost += [f"`{attribute}` of {module}.{name}" for attribute in attributes if attribute not in mentioned]
    return lost


def check_names() -> None:
    """Raise ImportError if the installed Transformer Engine has moved a private name that this package uses."""
    if lost := moved():
        raise ImportError(
            f"Transformer Engine {version('transformer_engine')} has no {', '.join(lost)} (used by lightning-lowprec)."
            f" Install a version that has: `{INSTALL['transformer_engine']}`.",
            name="transformer_engine",
        )


def _found(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _mentions(found: Any) -> Iterator[str]:
    """Yield the names and the strings in the code of a function, or of all methods of a class and its bases."""
    members = [value for cls in found.__mro__ for value in vars(cls).values()] if inspect.isclass(found) else [found]
    for member in members:
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield from _code_mentions(function.__code__)


def _code_mentions(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _code_mentions(constant)


# ---- the state of the process


def _manager() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def fp8_is_enabled() -> bool:
    """Return whether ``te.autocast`` surrounds the caller and enables FP8."""
    return bool(_manager().is_fp8_enabled())


def current_recipe() -> Any:
    """Return the recipe of the ``te.autocast`` that surrounds the caller."""
    return _manager().get_fp8_recipe()


def is_in_autocast() -> bool:
    """Return whether any ``te.autocast`` surrounds the caller, with FP8 enabled or not."""
    return bool(_manager().quantization_state.autocast_depth)


def is_exporting() -> bool:
    """Return whether ``te.onnx_export`` surrounds the caller."""
    from transformer_engine.pytorch.export import is_in_onnx_export_mode

    return bool(is_in_onnx_export_mode())


# ---- layers and their quantizers


def is_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer of Transformer Engine that may keep scales, or derives from one."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return isinstance(module, TransformerEngineBaseModule)


def weight_quantizer(linear: Any) -> Any:
    """Return the quantizer of a ``te.Linear``'s weight; the layer has begun a forward in FP8."""
    from transformer_engine.pytorch.constants import FP8FwdTensorIdx

    return linear.quantizers["scaling_fwd"][FP8FwdTensorIdx.GEMM1_WEIGHT]


def quantizer_roles(layer: Any) -> list[Any]:
    """Return the roles for which a layer will ask a CustomRecipe for quantizers, each of them once.

    A layer has up to two GEMMs before its roles repeat: input, weight, output; grad_output, grad_input.
    """
    from transformer_engine.pytorch.quantization import QuantizerRole

    found: list[Any] = []
    for forward, tensors in ((True, 3), (False, 2)):
        roles = layer.get_quantizer_roles(fwd=forward, num_quantizers=2 * tensors)
        found += [QuantizerRole()] if roles is None else roles
    return list(dict.fromkeys(found))


def is_quantizer_request(made: Any) -> bool:
    """Return whether a CustomRecipe's function has returned a request for a quantizer with state, not a quantizer."""
    from transformer_engine.pytorch.quantization import QuantizerRequest

    return isinstance(made, QuantizerRequest)


def is_sharded_by_fsdp2(module: nn.Module) -> bool:
    """Return whether FSDP2 shards ``module``, by itself or as a part of another module."""
    from transformer_engine.pytorch.distributed import _get_module_fsdp_state

    try:
        _get_module_fsdp_state(module)
    except RuntimeError:
        return False
    finally:
        module.__dict__.pop("_te_cached_parent_fsdp_state", None)  # deepcopy and pickle would take it along
    return True


# ---- delayed scaling

_META_KEYS: Final = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


def scale_state(layer: Any, mode: str) -> Any:
    """Return a layer's ``DelayedScalingRecipeState``, with ``scale`` and ``amax_history``, or None.

    Args:
        layer: of Transformer Engine.
        mode: ``"forward"`` or ``"backward"``.
    """
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    state = layer.fp8_meta.get(_META_KEYS[mode])
    return state if isinstance(state, DelayedScalingRecipeState) else None


def make_scale_state(layer: Any, mode: str, recipe: Any, count: int, device: torch.device | None) -> Any:
    """Give a layer that has not run yet a ``DelayedScalingRecipeState`` for ``count`` tensors, and return the state."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    state = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=count, device=device)
    layer.fp8_meta[_META_KEYS[mode]] = state
    return state


def register_scales(layers: Iterable[Any]) -> None:
    """Make the scales of every ``te.Linear`` in ``layers``, and register them in the buffers of the process.

    Layers with several GEMMs register their scales at their first forward.
    """
    from transformer_engine.pytorch import Linear

    for layer in layers:
        if isinstance(layer, Linear):
            layer.init_fp8_metadata(num_gemms=1)
            _manager().add_fp8_tensors_to_global_buffer(layer.fp8_meta)


def let_no_layer_renew_backward_scales() -> None:
    """Tell all layers, inside ``te.autocast``, that another layer was the first to run: only the first one renews."""
    _manager().quantization_state.is_first_fp8_module = False


def reduce_and_renew_backward_scales() -> None:
    """Reduce the amax of gradients over all ranks, and compute the scales of gradients from the history of amax."""
    _manager().reduce_and_update_fp8_tensors(forward=False)


def amax_of_this_step(*, forward: bool) -> list[list[Tensor]]:
    """Return the newest amax of all registered layers: of inputs and weights, or else of gradients."""
    buffers = _manager().quantization_state.global_amax_buffer
    return [rows for key, rows in buffers.items() if rows and _manager().split_key_in_buffer(key)[0] == forward]


def buffer_places() -> set[str]:
    """Return the keys in ``fp8_meta`` of a layer's places in buffers of the process: of amax, and of recomputation."""
    return {_manager().get_buffer_info(), "global_fp8_buffer_pos_fwd_recompute"}


def copied_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes that a copy of ``layer`` needs in the place of the layer's.

    The copy has the same scales, in buffers that are made and registered at its first forward; a copy that counted as
    registered would never renew its scales. It has no quantised weight.
    """
    from transformer_engine.common.recipe import CustomRecipe

    left = buffer_places()
    if isinstance(layer.fp8_meta.get("recipe"), CustomRecipe):  # its function may not pickle, and it has no scales
        left |= {"recipe", *_META_KEYS.values()}
    meta = {key: value for key, value in layer.fp8_meta.items() if key not in left}
    return {
        "fp8_meta": meta,
        "quantizers": {"scaling_fwd": [], "scaling_bwd": []},
        "fp8_initialized": False,
        "fp8_meta_tensors_initialized": False,
        "_fp8_workspaces": {},
    }
