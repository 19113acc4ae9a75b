"""How layers of the MS-AMP backend round their tensors: one power-of-two scale per tensor, from its amax."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from lightning_lowprec.msamp.linear import ScaledLinear
from lightning_lowprec.msamp.weight import master_of, values_of
from lightning_lowprec.numerics.casts import EVALUATES, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3, E5M2
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.scaling import power_of_two_scale


@compiled_on_cuda
def _e4m3_scale(amax: Tensor) -> Tensor:
    return power_of_two_scale(amax.float(), E4M3)


@compiled_on_cuda
def _e5m2_scale(amax: Tensor) -> Tensor:
    return power_of_two_scale(amax.float(), E5M2)


_E4M3: Final = Cast(dtype=E4M3.dtype, scale_of=_e4m3_scale)
_E5M2: Final = Cast(dtype=E5M2.dtype, scale_of=_e5m2_scale)


def numerics_of(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of a ScaledLinear. At O3 the weight is compared with its master, if this rank has it whole."""
    if not isinstance(layer, ScaledLinear):
        return "it is no linear layer"
    if not (layer.training or layer.fp8_eval or torch.is_grad_enabled()):
        return EVALUATES
    master = master_of(layer.weight)
    values = values_of(layer.weight) if master is None else master
    return LayerNumerics(input=_E4M3, weight=_E4M3, gradient=_E5M2, values=values)
