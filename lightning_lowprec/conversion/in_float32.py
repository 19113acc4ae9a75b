"""Run single modules in float32 in a model under autocast: ``recipe={"*.gate": "fp32", ...}``.

Inputs are cast to float32, autocast is off inside, and the output stays float32: a router's scores rounded to bf16
would send tokens to other experts. The module's weights are float32 too (``masters/kept_float32.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.matmuls import STACKED
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import FLOAT32
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import tree_map_only


def convert(model: nn.Module, plan: Plan) -> None:
    """Let the modules that ``plan`` runs in float32 do so, in place; their class, parameters and hooks stay."""
    revert(model)
    rows = (row for row in plan.rows if row.recipe == FLOAT32)
    fqns = {row.fqn.rpartition(".")[0] if row.kind == STACKED else row.fqn for row in rows}
    for fqn in fqns:
        module = model.get_submodule(fqn)
        module.forward = partial(_run, module)
        for parameter in module.parameters():
            if parameter.dtype in HALF_DTYPES:
                parameter.data = parameter.data.float()


def revert(model: nn.Module) -> None:
    """Undo :func:`convert`, in place; weights stay float32."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "func", None) is _run:
            del module.forward


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF_DTYPES else t, (args, kwargs))
    with torch.autocast(tensors[0].device.type if tensors else "cpu", enabled=False):
        return type(module).forward(module, *args, **kwargs)
