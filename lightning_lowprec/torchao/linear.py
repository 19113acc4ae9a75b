"""Convert layers to FP8 through torchao, in place, and back.

Conversion changes the class of the layer in place: hooks, flags, parameters, their order and ties stay. (torchao's own
swap builds a new module and loses hooks and the eval flag.)

Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.gemms import NO_GEMM
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.torchao.experts import FP8Experts, fp8_experts
from lightning_lowprec.torchao.layer import FP8Layer
from lightning_lowprec.torchao.settings import LayerSettings


@final
class FP8Linear(FP8Layer, Float8Linear):
    """A Linear with FP8 GEMMs."""

    in_by_out = False

    def _plain(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def convert(
    model: nn.Module, fqns: Sequence[str], settings_of: Callable[[str], LayerSettings], *, fp8_eval: bool
) -> None:
    """Make the layers named by ``fqns`` FP8Layers, in place; ``settings_of`` returns the settings of an fqn."""
    convert_to_float8_training(nn.Identity())  # applies torchao's process-wide compiler fixes
    for fqn in fqns:
        configure(model.get_submodule(fqn), settings_of(fqn), fp8_eval=fp8_eval)


def configure(linear: Any, settings: LayerSettings, *, fp8_eval: bool) -> None:
    """Make a Linear or Conv1D an FP8Layer with these settings, in place."""
    own = {"fp8_eval": fp8_eval, "weight_is_freed": False, "phase_gemms": NO_GEMM}
    if not is_conv1d(linear):
        own |= settings.attributes(linear.in_features, linear.out_features)
        in_place.become(linear, FP8Linear, own)
        return
    from lightning_lowprec.torchao.conv1d import FP8Conv1D

    sizes = sizes_of_conv1d(linear)
    in_place.become(linear, FP8Conv1D, {**own, **settings.attributes(**sizes), **sizes})


def save_no_weight_codes(model: nn.Module) -> None:
    """Save no codes of weights for the backward: whole weights are gathered for each use, and freed."""
    layers: list[FP8Layer | FP8Experts] = [*fp8_linears(model), *fp8_experts(model)]
    for layer in layers:
        layer.saves_weight_codes = False


def note_freed(model: nn.Module) -> None:
    """Note that the memory of the weights is freed between forward and backward: no layer keeps it, or codes."""
    save_no_weight_codes(model)
    for layer in fp8_linears(model):
        layer.weight_is_freed = True


def revert(model: nn.Module) -> None:
    """Give every FP8Layer of ``model`` its own class back, in place."""
    for linear in fp8_linears(model):
        in_place.revert(linear)


def fp8_linears(model: nn.Module) -> list[FP8Layer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, FP8Layer)]
