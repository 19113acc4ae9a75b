"""The entry of the MS-AMP backend in the registry: everything that the rest of the package knows about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from lightning_lowprec.conversion.name_formats import HYBRID, Formats
from lightning_lowprec.msamp import fsdp2
from lightning_lowprec.msamp.adamw_sgd import revert_optimizer
from lightning_lowprec.msamp.layer import ScaledLayer
from lightning_lowprec.msamp.linear import ScaledLinear, revert
from lightning_lowprec.msamp.optimizer import scaled_optimizers
from lightning_lowprec.msamp.plugin import BACKEND as NAME
from lightning_lowprec.msamp.plugin import MSAMP
from lightning_lowprec.msamp.weight import coded_weight, master_of, msamp_state_of, values_of
from lightning_lowprec.numerics.casts import EVALUATES, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3, E5M2
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.scaling import power_of_two_scale
from lightning_lowprec.numerics.weight_rounding import WeightRounding, exponent_scale

_ROUNDING: Final = WeightRounding(scale_per="tensor", scale_of=exponent_scale)


def _name(level: str, summary: str, formats: Formats) -> PrecisionName:
    return PrecisionName(
        plugin=MSAMP,
        options={"level": level},
        summary=summary,
        gathers_fp8=level == "O3",
        formats=formats,
        conv1d="gathered",
        weight_rounding=lambda: _ROUNDING,
        hardware_recipe="msamp",
    )


_O1: Final = replace(HYBRID, weight="fp16", gradient="e4m3", ddp="e4m3", fsdp2="-")
_O2: Final = replace(_O1, moments="e4m3, fp16")
_O3: Final = replace(_O2, weight="e4m3", master="fp16", fsdp2="e4m3")
_NAMES: Final = {
    "msamp-o1": _name("O1", "FP8 linear layers with fp16 weights and FP8 gradients, float32 moments", _O1),
    "msamp-o2": _name("O2", "FP8 linear layers with fp16 weights, FP8 gradients, e4m3 and fp16 moments", _O2),
    "msamp-o3": _name("O3", "FP8 linear layers with e4m3 weights and fp16 masters, the rest as msamp-o2", _O3),
}


def _shard_codes(model: nn.Module, shards: int, options: Any) -> Callable[[DeviceMesh], None]:
    fsdp2.check_options(options, model)
    fsdp2.code_shards(model, shards)
    return lambda mesh: fsdp2.collect(model, mesh)


@compiled_on_cuda
def _e4m3_scale(amax: Tensor) -> Tensor:
    return power_of_two_scale(amax.float(), E4M3)


@compiled_on_cuda
def _e5m2_scale(amax: Tensor) -> Tensor:
    return power_of_two_scale(amax.float(), E5M2)


_E4M3: Final = Cast(dtype=E4M3.dtype, scale_of=_e4m3_scale)
_E5M2: Final = Cast(dtype=E5M2.dtype, scale_of=_e5m2_scale)


def _numerics(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of a layer. At O3 the weight is compared with its master, if this rank has it whole."""
    if not isinstance(layer, ScaledLinear):
        return "it is no linear layer"
    if not (layer.training or layer.fp8_eval or torch.is_grad_enabled()):
        return EVALUATES
    master = master_of(layer.weight)
    values = values_of(layer.weight) if master is None else master
    return LayerNumerics(input=_E4M3, weight=_E4M3, gradient=_E5M2, values=values)


BACKEND: Final = Backend(
    name=NAME,
    title="MS-AMP",
    names=_NAMES,
    layers_from=("lightning_lowprec.msamp.",),
    revert=revert,
    revert_optimizer=revert_optimizer,
    changed_optimizers=scaled_optimizers,
    coded_weight=coded_weight,
    keeps_master=lambda param: msamp_state_of(param) is not None,
    shard_codes=_shard_codes,
    numerics=_numerics,
    weight_roundings=lambda layer: {"weight": _ROUNDING} if isinstance(layer, ScaledLayer) else {},
)
