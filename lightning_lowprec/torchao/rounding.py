"""How layers of the torchao backend round their weights in the forward. Importing this module imports torchao."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.torchao.experts import FP8Experts
from lightning_lowprec.torchao.layer import FP8Layer
from lightning_lowprec.torchao.settings import LayerSettings


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return the roundings of a layer's weights, by name; a weight that the forward reads in bf16 has none."""
    if isinstance(layer, FP8Layer):
        found = {"weight": None if "forward" in layer.own_gemms else _of_config(layer.config)}
    elif isinstance(layer, FP8Experts):
        found = {name: _of_settings(settings) for name, settings in layer.settings.items()}
    else:
        found = {}
    return {name: rounding for name, rounding in found.items() if rounding is not None}


def of_recipe(scale_per_row: bool, power_of_2: bool) -> WeightRounding:
    """Return torchao's rounding of weights."""
    return WeightRounding(scale_per="row" if scale_per_row else "tensor", scale_of=partial(scale_of, power_of_2))


def scale_of(power_of_2: bool, amax: Tensor) -> Tensor:
    """Return torchao's scales: (...) float32 -> (...) float32."""
    scale: Tensor = amax_to_scale(amax, E4M3.dtype, power_of_2)
    return scale


def _of_settings(settings: LayerSettings) -> WeightRounding | None:
    return None if "forward" in settings.in_bf16 else _of_config(settings.config)


def _of_config(config: Float8LinearConfig) -> WeightRounding | None:
    cast = config.cast_config_weight
    if cast.scaling_type is ScalingType.DISABLED:
        return None
    return of_recipe(cast.scaling_granularity is ScalingGranularity.AXISWISE, config.round_scales_to_power_of_2)
