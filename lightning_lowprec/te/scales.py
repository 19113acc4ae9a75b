"""The state of delayed scaling, as plain tensors that ``torch.load(weights_only=True)`` reads.

A layer has 3 scales forward (input, weight, output) and 2 backward (grad_output, grad_input), float32, and for each the
history of its amax: [amax_history_len, 3] and [amax_history_len, 2]. Transformer Engine makes them at the first forward
and registers them in process-wide buffers, where they are reduced and renewed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import Linear
from transformer_engine.pytorch.quantization import DelayedScalingRecipeState, FP8GlobalStateManager

_MODES: Final = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
_TENSORS: Final = ("scale", "amax_history")
_REGISTERED: Final[str] = FP8GlobalStateManager.get_buffer_info()
_STASHED: Final = "global_fp8_buffer_pos_fwd_recompute"
"""Where the scales of forwards that will be recomputed stand, in another process-wide buffer."""

LayerScales = dict[str, Tensor]
"""``{"forward.scale": ..., "forward.amax_history": ..., "backward.scale": ..., ...}``, on the CPU."""


def saved(layers: Iterable[tuple[str, Any]]) -> dict[str, LayerScales]:
    """The scales of every layer that has any, by name; empty with recipes that keep none.

    Args:
        layers: names and modules of Transformer Engine.
    """
    found = {}
    for name, layer in layers:
        states = {mode: layer.fp8_meta.get(key) for mode, key in _MODES.items()}
        if all(isinstance(state, DelayedScalingRecipeState) for state in states.values()):
            found[name] = {
                f"{mode}.{tensor}": getattr(state, tensor).detach().cpu().clone()
                for mode, state in states.items()
                for tensor in _TENSORS
            }
    return found


@torch.inference_mode(False)  # validation may come first, and training cannot write to what it would make
@torch.no_grad()
def restore(layers: Iterable[tuple[str, Any]], state: Mapping[str, LayerScales], recipe: Any) -> list[str]:
    """Give layers the scales that :func:`saved` took; they are used from the next forward on.

    Args:
        layers: names and modules of Transformer Engine; some may not have run yet.
        state: by name. A history of another length than the recipe's is cut, or filled up with zeros.
        recipe: delayed scaling, which the layers will run with.

    Returns:
        The names in ``state`` that no layer has.
    """
    left = dict(state)
    for name, layer in layers:
        entry = left.pop(name, None)
        if entry is None:
            continue
        for mode, key in _MODES.items():
            if not isinstance(layer.fp8_meta.get(key), DelayedScalingRecipeState):
                layer.fp8_meta[key] = _fresh(recipe, mode, entry[f"{mode}.scale"], layer)
            target = layer.fp8_meta[key]
            target.scale.copy_(entry[f"{mode}.scale"])
            history = entry[f"{mode}.amax_history"][: len(target.amax_history)]
            target.amax_history.zero_()
            target.amax_history[: len(history)].copy_(history)
    return list(left)


def _fresh(recipe: Any, mode: str, scale: Tensor, layer: nn.Module) -> DelayedScalingRecipeState:
    owner: nn.Module = getattr(layer, "owner", layer)  # of the weights that a fused layer borrows
    device = next((p.device for p in owner.parameters()), None)
    return DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=scale.numel(), device=device)


@torch.inference_mode(False)
def register(layers: Iterable[tuple[str, Any]]) -> None:
    """Make and register the scales of Linears before any runs, inside Transformer Engine's autocast.

    Ranks reduce amax by the order of registration, which else is that of first forwards: an expert that gets no token
    on one rank would be missing there, and every layer after it take the amax of another.

    Args:
        layers: names and modules of Transformer Engine; those with several GEMMs register at their first forward.
    """
    for _, layer in layers:
        if isinstance(layer, Linear):
            layer.init_fp8_metadata(num_gemms=1)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)


def renew_backward_scales_ourselves() -> None:
    """Within ``te.autocast``: let no layer renew the backward scales, as the first one to run would.

    If that one gets no backward (its output is detached, or its branch unused), no backward scale would ever change.
    """
    FP8GlobalStateManager.quantization_state.is_first_fp8_module = False


def renew_backward_scales() -> None:
    """Once per optimizer step, on every rank: reduce the amax of gradients since the last, and renew their scales."""
    drop_nonfinite(forward=False)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


@torch.no_grad()
def drop_nonfinite(*, forward: bool) -> None:
    """Take amax that are not finite for unseen, before Transformer Engine reduces them and puts them into the history.

    It keeps a scale as it is while the largest amax is not finite, which a history of 1024 steps makes 1024 steps.
    Every layer of the process at once: few kernels, no synchronisation.

    Args:
        forward: of inputs and weights, or else of gradients.
    """
    for key, rows in FP8GlobalStateManager.quantization_state.global_amax_buffer.items():
        if rows and FP8GlobalStateManager.split_key_in_buffer(key)[0] == forward:
            flat = torch.cat(rows).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            torch._foreach_copy_(rows, list(torch.split(flat, [len(row) for row in rows])))


def detached(layer: Any) -> dict[str, Any]:
    """Attributes of a copy of ``layer``: the same scales, in buffers that are made and registered at its first forward.

    A copy that believed itself registered would never renew its scales.
    """
    left = {_REGISTERED, _STASHED}
    if isinstance(layer.fp8_meta.get("recipe"), CustomRecipe):  # a function, which may not pickle, and no scales
        left |= {"recipe", *_MODES.values()}
    meta = {key: value for key, value in layer.fp8_meta.items() if key not in left}
    return {
        "fp8_meta": meta,
        "quantizers": {"scaling_fwd": [], "scaling_bwd": []},
        "fp8_initialized": False,
        "fp8_meta_tensors_initialized": False,
    }
