"""Say in which dtype a weight that stays in high precision multiplies, as far as a plan can know without a run."""

from __future__ import annotations

from torch import nn

from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.conversion.matmuls import Matmul
from lightning_lowprec.conversion.recipe_map import FLOAT32

_MAYBE_FLOAT32 = ("router", "gate beside experts")
"""Layers that many models run in float32, outside of autocast, as ``selection.built_in`` calls them."""


def runs_in(matmul: Matmul, module: nn.Module, role: str, base: str, head: str) -> str | None:
    """Return the dtype in which a kept weight multiplies; None: the code of the model decides, at each forward.

    Args:
        matmul: the weight.
        module: its module.
        role: the word of ``selection.built_in`` for the layer, or "".
        base: the dtype of autocast: ``"bf16"`` or ``"fp16"``.
        head: the option ``head``; in FP8, the products of a head differ between training and evaluation.
    """
    if role.startswith("output head") and head == FLOAT32:
        return FLOAT32
    if role.startswith(_MAYBE_FLOAT32) or (role.startswith("output head") and head == "fp8"):
        return None
    if matmul.kind == "Linear":
        own_class = getattr(module, "own_class", type(module))  # `own_class`: converted in place, by an earlier plan
        follows = own_class.forward is nn.Linear.forward and "forward" not in vars(module)
    elif matmul.kind == "stacked experts":
        follows = is_stack(module)
    else:
        follows = matmul.kind == "Conv1D"
    return base if follows else None
