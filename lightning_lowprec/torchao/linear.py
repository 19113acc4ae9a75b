"""Convert layers to FP8 through torchao, in place, and back.

Conversion changes the class of the layer in place: hooks, flags, parameters, their order and ties stay. (torchao's own
swap builds a new module and loses hooks and the eval flag.)

Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.adapters import merged_adapters
from lightning_lowprec.conversion.gemms import NO_GEMM
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.private.torch_modules import before_compiled_call, remove_compiled_call
from lightning_lowprec.torchao.experts import FP8Experts, fp8_experts
from lightning_lowprec.torchao.layer import FP8Layer
from lightning_lowprec.torchao.settings import LayerSettings
from lightning_lowprec.torchao.weight_codes import ModelCodes

_checked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Compiled modules, and their compiled calls with a check of kept codes before them; a call holds its module."""


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
    own = {"fp8_eval": fp8_eval, "weight_codes": None, "weight_is_freed": False, "phase_gemms": NO_GEMM}
    if not is_conv1d(linear):
        own |= settings.attributes(linear.in_features, linear.out_features)
        in_place.become(linear, FP8Linear, own)
        return
    from lightning_lowprec.torchao.conv1d import FP8Conv1D

    sizes = sizes_of_conv1d(linear)
    in_place.become(linear, FP8Conv1D, {**own, **settings.attributes(**sizes), **sizes})


def keep_codes(model: nn.Module) -> None:
    """Let the FP8Layers of ``model`` keep the codes of their weights from step to step, also within compiled modules.

    Compiled code does not check whether codes are current. The check runs before each call of a compiled module.
    """
    layers, stacks = _encoded_per_step(model)
    if not layers and not stacks:
        return
    config: Any = layers[0].config if layers else next(iter(stacks[0].recipes.values()))
    codes = ModelCodes(power_of_2=config.round_scales_to_power_of_2, kernel=not config.emulate)
    merged = merged_adapters(model)
    for layer in layers:
        layer.weight_codes = codes.add(layer, merged=merged.get(layer, ()))
    for stack in stacks:
        stack.weight_codes = {name: codes.add(stack, name) for name in stack.encoded_per_step()}
    for compiled in _outermost_compiled(model):
        below, beside = _encoded_per_step(compiled)
        inside: list[FP8Layer | FP8Experts] = [*below, *beside]
        known = _checked.get(compiled)
        if known is None or known() is not compiled._compiled_call_impl:
            before_compiled_call(compiled, partial(check_codes, inside))
            _checked[compiled] = weakref.ref(compiled._compiled_call_impl)
        for kept in itertools.chain.from_iterable(layer.all_codes() for layer in inside):
            kept.checked_outside = True


def note_freed(model: nn.Module) -> None:
    """Note that the memory of the weights is freed between forward and backward: no layer keeps it, or codes."""
    for layer in fp8_linears(model):
        layer.weight_is_freed = True


def check_codes(layers: Sequence[FP8Layer | FP8Experts]) -> None:
    """Bring kept codes of ``layers`` up to date, except of layers that have been reverted since."""
    for layer in layers:
        if isinstance(layer, FP8Layer | FP8Experts):
            for codes in layer.all_codes():
                if codes.is_read:
                    layer.check_codes(codes)


def _encoded_per_step(model: nn.Module) -> tuple[list[FP8Layer], list[FP8Experts]]:
    layers = [layer for layer in fp8_linears(model) if layer.encoded_per_step]
    return layers, [stack for stack in fp8_experts(model) if stack.encoded_per_step()]


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
    for module in model.modules():
        known = _checked.pop(module, None)
        call = None if known is None else known()
        if call is not None and call is module._compiled_call_impl:
            remove_compiled_call(call)


def fp8_linears(model: nn.Module) -> list[FP8Layer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, FP8Layer)]
