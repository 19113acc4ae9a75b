"""The entry of the MS-AMP backend in the registry: everything that the rest of the package knows about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from lightning_lowprec.msamp.optimizer import scaled_optimizers
from lightning_lowprec.msamp.plugin import BACKEND as NAME
from lightning_lowprec.msamp.plugin import MSAMP
from lightning_lowprec.msamp.revert import revert, revert_optimizer
from lightning_lowprec.msamp.weight import coded_weight, msamp_state_of
from lightning_lowprec.numerics.casts import LayerNumerics
from lightning_lowprec.numerics.weight_rounding import WeightRounding, exponent_scale

_ROUNDING: Final = WeightRounding(scale_per="tensor", scale_of=exponent_scale)
_NAMES: Final = {
    "msamp-o1": PrecisionName(
        plugin=MSAMP,
        options={"level": "O1"},
        summary="FP8 linear layers with fp16 weights and FP8 gradients, float32 moments",
        bytes_of_codes=(2, 1, 8),
        conv1d="gathered",
        weight_rounding=lambda: _ROUNDING,
        hardware_recipe="msamp",
    ),
    "msamp-o2": PrecisionName(
        plugin=MSAMP,
        options={"level": "O2"},
        summary="FP8 linear layers with fp16 weights, FP8 gradients, e4m3 and fp16 moments",
        bytes_of_codes=(2, 1, 3),
        conv1d="gathered",
        weight_rounding=lambda: _ROUNDING,
        hardware_recipe="msamp",
    ),
    "msamp-o3": PrecisionName(
        plugin=MSAMP,
        options={"level": "O3"},
        summary="FP8 linear layers with e4m3 weights and fp16 masters, the rest as msamp-o2",
        gathers_fp8=True,
        bytes_of_codes=(1, 1, 5),
        conv1d="gathered",
        weight_rounding=lambda: _ROUNDING,
        hardware_recipe="msamp",
    ),
}


def _shard_codes(model: nn.Module, shards: int, options: Any) -> Callable[[DeviceMesh], None]:
    from lightning_lowprec.msamp import fsdp2

    fsdp2.check_options(options, model)
    fsdp2.code_shards(model, shards)
    return lambda mesh: fsdp2.collect(model, mesh)


def _numerics(layer: nn.Module) -> LayerNumerics | str:
    from lightning_lowprec.msamp.casts import numerics_of

    return numerics_of(layer)


def _weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    return {"weight": _ROUNDING} if BACKEND.owns(layer) else {}


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
    weight_roundings=_weight_roundings,
)
