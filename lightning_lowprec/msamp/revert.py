"""Give a model and its optimizer the float32 weights and the plain classes back that MS-AMP has replaced, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.conversion import in_place
from lightning_lowprec.msamp.ddp import include_again
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.linear import scaled_linears
from lightning_lowprec.msamp.optimizer import ScaledOptimizer
from lightning_lowprec.msamp.weight import master_of, msamp_state_of, revert_weight_, values_of
from lightning_lowprec.numerics.parameters import parameters_of


def revert(model: nn.Module) -> None:
    """Give every ScaledLayer its own class back, and make its weight float32: its master, else its value.

    Parameter objects stay. Weights that FSDP2 has sharded stay codes.
    """
    coded = {
        fqn: p for fqn, p in model.named_parameters() if msamp_state_of(p) is not None and not isinstance(p, DTensor)
    }
    for p in coded.values():
        _revert_weight(p)
    for linear in scaled_linears(model).values():
        if msamp_state_of(linear.weight) is None:
            in_place.revert(linear)
    include_again(model, {id(p) for p in coded.values()})


@torch.no_grad()
def _revert_weight(param: Any) -> None:
    master = master_of(param)
    values = values_of(param) if master is None else master
    grad, param.grad = param.grad, None
    revert_weight_(param, values)
    param.grad = grad.decode() if isinstance(grad, ScaledGradient) else grad


def revert_optimizer(optimizer: Optimizer) -> None:
    """Make an optimizer plain that MS-AMP has converted, after its weights; its state becomes float32."""
    plain = vars(optimizer).get("plain_class")
    if not isinstance(optimizer, ScaledOptimizer) or any(
        msamp_state_of(p) is not None for p in parameters_of(optimizer)
    ):
        return
    saved: Any = optimizer.state_dict()
    if plain is None:
        optimizer.load_state_dict(saved)
        return
    for name in ("plain_class", "level", "stochastic_rounding", "seed", "compile"):
        vars(optimizer).pop(name)
    optimizer.__class__ = plain
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for key, p in zip(keys, parameters_of(optimizer), strict=True):  # torch's own loading casts to the weights' dtype
        if key in saved["state"]:
            optimizer.state[p] = saved["state"][key]
