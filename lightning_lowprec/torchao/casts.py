"""How layers of the torchao backend round their tensors. Importing this module imports torchao (about 3 s)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchao.float8 import CastConfig
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.conversion.gemms import GEMMS
from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.private.torchao import codes_of
from lightning_lowprec.torchao.gathered_weight import GatheredWeight
from lightning_lowprec.torchao.layer import FP8Layer
from lightning_lowprec.torchao.linear import FP8Linear


def numerics_of(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of an FP8Linear, by its own configuration; inside of a forward under FSDP2."""
    if not isinstance(layer, FP8Linear):
        return "a Conv1D" if isinstance(layer, FP8Layer) else "its products are inside of the module"
    if len(layer.in_bf16) == len(GEMMS):
        return HIGH
    if not (layer.training or layer.fp8_eval):
        return EVALUATES
    config, weight = layer.config, layer.weight
    cast = partial(_cast, power_of_2=config.round_scales_to_power_of_2)
    of_weight = cast(config.cast_config_weight)
    gathered = isinstance(weight, GatheredWeight)
    if gathered and isinstance(of_weight, Cast):
        of_weight = Cast(dtype=of_weight.dtype, scale_of=partial(_gathered_scale, weight))
    return LayerNumerics(
        input=cast(config.cast_config_input),
        weight=of_weight,
        gradient=cast(config.cast_config_grad_output),
        values=None if gathered else weight,
    )


def _cast(choice: CastConfig, *, power_of_2: bool) -> Cast | str:
    if choice.scaling_type is ScalingType.DISABLED or choice.target_dtype is None:
        return HIGH
    by_row = choice.scaling_granularity is ScalingGranularity.AXISWISE
    return Cast(
        dtype=choice.target_dtype,
        scale_of=lambda amax: _scale(amax, choice.target_dtype, power_of_2),
        by_row=by_row,
    )


@compiled_on_cuda
def _scale(amax: Tensor, dtype: Any, power_of_2: bool) -> Tensor:
    scale: Tensor = amax_to_scale(amax, dtype, power_of_2)
    return scale


def _gathered_scale(weight: Any, amax: Tensor) -> Tensor:
    return codes_of(weight)[1]
