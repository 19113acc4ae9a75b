"""Functions of the registry entry: how a layer rounds its tensors."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from lightning_lowprec.msamp.layer import ScaledLayer
from lightning_lowprec.msamp.linear import ScaledLinear
from lightning_lowprec.msamp.weight import values_of
from lightning_lowprec.numerics.casts import EVALUATES, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3, E5M2, power_of_two_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.weight_rounding import WeightRounding

_ROUNDING: Final = WeightRounding(scale_per="tensor", scale_of=power_of_two_scale)


def rounding() -> WeightRounding:
    """Return how the forward of every layer rounds its weight."""
    return _ROUNDING


_scale: Final = compiled_on_cuda(power_of_two_scale)
_E4M3: Final = Cast(dtype=E4M3.dtype, scale_of=lambda amax: _scale(amax, E4M3))
_E5M2: Final = Cast(dtype=E5M2.dtype, scale_of=lambda amax: _scale(amax, E5M2))


def numerics_of(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of a layer."""
    if not isinstance(layer, ScaledLinear):
        return "it is no linear layer"
    if not (layer.training or layer.fp8_eval or torch.is_grad_enabled()):
        return EVALUATES
    return LayerNumerics(input=_E4M3, weight=_E4M3, gradient=_E5M2, values=values_of(layer.weight))


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return how the forward of a layer rounds its weight."""
    return {"weight": _ROUNDING} if isinstance(layer, ScaledLayer) else {}
