"""The entry of torchao's prototypes in the registry: everything that the rest of the package knows about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from torch import nn

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from lightning_lowprec.conversion.gemms import InBF16
from lightning_lowprec.conversion.name_suffixes import FP16
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics.casts import LayerNumerics
from lightning_lowprec.precision import half_norms
from lightning_lowprec.torchao_prototype.int8 import Int8TorchAO
from lightning_lowprec.torchao_prototype.mxfp8 import MXFP8TorchAO
from lightning_lowprec.torchao_prototype.plugin import BACKEND as NAME

if TYPE_CHECKING:
    from lightning_lowprec.torchao_prototype.layer import PrototypeLayer


def _revert(model: nn.Module) -> None:
    half_norms.release(model)
    if any(BACKEND.owns(module) for module in model.modules()):
        from lightning_lowprec.torchao_prototype import convert

        convert.revert(model)


def _reconfigure(layer: nn.Module, recipe: LayerRecipe) -> None:
    from lightning_lowprec.torchao_prototype.convert import reconfigure

    reconfigure(layer, recipe)


def _set_phase(layer: nn.Module, gemms: InBF16) -> None:
    from lightning_lowprec.torchao_prototype.convert import set_phase

    set_phase(layer, gemms)


def _numerics(layer: nn.Module) -> LayerNumerics | str | None:
    return "its scales belong to rows and columns, or to blocks of 32 values, and change with each product"


def _weight_roundings(layer: nn.Module) -> Mapping[str, None]:
    """Return the weight, whose codes no server's format has: the format's own scales are what it gets."""
    return {} if "forward" in cast("PrototypeLayer", layer).in_high else {"weight": None}


BACKEND: Final = Backend(
    name=NAME,
    title="torchao (prototype)",
    names={
        Int8TorchAO.name: PrecisionName(
            plugin=Int8TorchAO,
            summary="torchao's int8 linear layers, a scale per row (prototype; Ampere, Ada, Hopper)",
            fp16=True,
            masters=True,
            conv1d="converted",
            layer_recipes=("int8",),
            hardware_recipe="int8",
        ),
        MXFP8TorchAO.name: PrecisionName(
            plugin=MXFP8TorchAO,
            summary="torchao, a power-of-two scale per 32 values, e4m3 (prototype; Blackwell, else emulated)",
            masters=True,
            lacks={FP16: "its kernels take and return bf16"},
            alignment=MXFP8TorchAO.alignment,
            conv1d="converted",
            layer_recipes=("mxfp8",),
            hardware_recipe="torchao-mxfp8",
        ),
    },
    suffix="-torchao",
    recipes={"int8": False, "mxfp8": False},
    module="torchao",
    distribution="torchao",
    layers_from=("lightning_lowprec.torchao_prototype.",),
    revert=_revert,
    reconfigure=_reconfigure,
    set_phase=_set_phase,
    cuts_layers=False,
    numerics=_numerics,
    weight_roundings=_weight_roundings,
)
