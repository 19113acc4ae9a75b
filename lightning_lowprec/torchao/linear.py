"""Convert layers to FP8 through torchao, in place, and back.

Conversion changes the class of the layer in place: hooks, flags, parameters, their order and ties stay. (torchao's own
swap builds a new module and loses hooks and the eval flag.)

Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_linear import Float8Linear

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.private.torch_modules import before_compiled_call
from lightning_lowprec.torchao.layer import FP8Layer
from lightning_lowprec.torchao.own_backward import ScaledInside
from lightning_lowprec.torchao.weight_codes import ModelCodes

_checked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Compiled modules, and their compiled calls with a check of kept codes before them; a call holds its module."""


@final
class FP8Linear(FP8Layer, Float8Linear):
    """A Linear with FP8 GEMMs."""

    in_by_out = False

    def _plain(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def linear_config(
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"],
    *,
    fp8_format: Literal["hybrid", "e4m3"],
    emulate: bool,
    round_scales_to_power_of_2: bool | None,
    rowwise_backward: Literal["scaled_after", "scaled_inside"] = "scaled_after",
) -> Float8LinearConfig:
    """Return torchao's configuration of a recipe; the arguments are those of ``FP8TorchAO``."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    if recipe == "tensorwise" and fp8_format == "e4m3":
        # a fresh CastConfig: torchao writes the target dtype into the one it is given
        grad_output = CastConfig(target_dtype=e4m3_dtype)
        config = replace(
            config, cast_config_grad_output=grad_output, cast_config_grad_output_for_grad_weight=grad_output
        )
    if round_scales_to_power_of_2 is not None:
        config = replace(config, round_scales_to_power_of_2=round_scales_to_power_of_2)
    return ScaledInside.of(config) if rowwise_backward == "scaled_inside" else config


def convert(
    model: nn.Module,
    fqns: Sequence[str],
    config: Float8LinearConfig,
    *,
    fp8_eval: bool,
    per_step: bool = False,
    saves_codes: bool = False,
) -> None:
    """Make the Linears and Conv1Ds named by ``fqns`` FP8Layers, in place."""
    convert_to_float8_training(nn.Identity(), config=config)  # applies torchao's process-wide compiler fixes
    for fqn in fqns:
        layer = model.get_submodule(fqn)
        configure(layer, config, fp8_eval=fp8_eval, per_step=per_step, saves_codes=saves_codes)


def configure(
    linear: nn.Module, config: Float8LinearConfig, *, fp8_eval: bool, per_step: bool = False, saves_codes: bool = False
) -> None:
    """Make ``linear`` an FP8Layer of this configuration, in place."""
    with torch.device("meta"):  # the constructor derives from the configuration what the forward needs
        made = Float8Linear(1, 1, bias=False, config=config)  # type: ignore[no-untyped-call]
    own = {"fp8_eval": fp8_eval, "weight_codes": None, "encoded_per_step": per_step, "saves_codes": saves_codes}
    if not is_conv1d(linear):
        in_place.become(linear, FP8Linear, {**vars(made), **own})
        return
    from lightning_lowprec.torchao.conv1d import FP8Conv1D

    mm = {"config": made.config, "linear_mm_config": made.linear_mm_config}
    in_place.become(linear, FP8Conv1D, {**mm, **sizes_of_conv1d(linear), **own})


def keep_codes(model: nn.Module) -> None:
    """Let the FP8Layers of ``model`` keep the codes of their weights from step to step, also within compiled modules.

    Compiled code does not check whether codes are current. The check runs before each call of a compiled module.
    """
    layers = fp8_linears(model)
    if not layers:
        return
    config = layers[0].config
    ModelCodes(layers, power_of_2=config.round_scales_to_power_of_2, kernel=not config.emulate)
    for compiled in _outermost_compiled(model):
        inside = fp8_linears(compiled)
        known = _checked.get(compiled)
        if known is None or known() is not compiled._compiled_call_impl:
            before_compiled_call(compiled, partial(check_codes, inside))
            _checked[compiled] = weakref.ref(compiled._compiled_call_impl)
        for layer in inside:
            assert layer.weight_codes is not None
            layer.weight_codes.checked_outside = True


def check_codes(layers: Sequence[FP8Layer]) -> None:
    """Bring kept codes of ``layers`` up to date."""
    for layer in layers:
        codes = vars(layer).get("weight_codes")
        if codes is not None:
            layer.check_codes(codes)


def _outermost_compiled(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield module
        return
    for child in module.children():
        yield from _outermost_compiled(child)


def revert(model: nn.Module) -> None:
    """Give every FP8Layer of ``model`` its own class back, in place."""
    for linear in fp8_linears(model):
        in_place.revert(linear)


def fp8_linears(model: nn.Module) -> list[FP8Layer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, FP8Layer)]
