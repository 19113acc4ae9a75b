"""Linear layers whose weight is kept as codes and whose three GEMMs run in FP8 (MS-AMP, arXiv 2310.18313).

Every tensor has one power-of-two scale, from its amax. Between forward and backward a layer keeps the codes of the
input, one byte per element. The gradient of the weight is a ``ScaledGradient``, also one byte per element. The products
are in :mod:`~lightning_lowprec.msamp.matmul`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion.transforms import KEEP, check_call
from lightning_lowprec.msamp.matmul import ScaledMatmul
from lightning_lowprec.msamp.weight import (
    move_,
    msamp_state_of,
    required_state_of,
    scale_weight_,
    values_of,
)
from lightning_lowprec.msamp.weight_state import Level
from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.private.torch import are_transforms_active, is_tracing

_ALIGNMENT: Final = 16
"""FP8 kernels need inner dimensions that are multiples of 16."""


@final
class ScaledLinear(nn.Linear):
    """A Linear after :func:`scale_linears`. Its state dict is that of a plain Linear, in float32."""

    emulate: bool
    """Multiply dequantised codes in float32, instead of running FP8 kernels."""
    fp8_eval: bool
    """Multiply in FP8 in evaluation without gradients too, instead of with the exact values of the weight."""
    float32_gradients: bool
    """Give the weight a float32 gradient, instead of a ScaledGradient."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype; without autocast, in the dtype of the input."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return F.linear(input, self.weight, self.bias)  # raises as nn.Linear does
        if not (self.training or self.fp8_eval or torch.is_grad_enabled()):
            return F.linear(input, values_of(self.weight).to(input.dtype), self.bias)
        if are_transforms_active() or torch.compiler.is_exporting() or is_tracing():
            check_call("ScaledLinear (MS-AMP)", KEEP)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        fits = input.numel() // self.in_features % _ALIGNMENT == 0  # a slice of all rows would be copied in backward
        rows = input.reshape(-1, self.in_features) if fits else pad_rows(input, _ALIGNMENT)
        output: Tensor = ScaledMatmul.apply(rows, self.weight, self.emulate, self.float32_gradients)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], self.out_features) if fits else cut_rows(output, input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = values_of(self.weight)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        # assign=True is ignored: the parameter stays, and the values are encoded into it
        metadata = {key: value for key, value in local_metadata.items() if key != "assign_to_params_buffers"}
        state = required_state_of(self.weight)
        state.loading = True
        try:
            super()._load_from_state_dict(state_dict, prefix, metadata, *args, **kwargs)
        finally:
            state.loading = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledLinear:
        """Move the codes to another device together with their scales; never change their dtype."""
        weight = self._parameters.pop("weight", None)
        if weight is None:
            required_state_of(self.weight)  # raises: pruning has put another tensor in its place
        assert weight is not None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters = {"weight": weight, **self._parameters}
        device = fn(torch.empty(0, dtype=torch.uint8, device=weight.device)).device
        if device != weight.device:
            move_(weight, device)
        return self


def scale_linears(
    model: nn.Module,
    fqns: Sequence[str],
    level: Level,
    *,
    emulate: bool | None = None,
    fp8_eval: bool = True,
    float32_gradients: bool = False,
) -> None:
    """Turn the Linears named by ``fqns`` into ScaledLinear, in place; Parameters stay the same objects.

    Args:
        model: holds them.
        fqns: as in ``model.named_modules()``; ``""`` is the model itself.
        level: of the weights, as in ``scale_weight_``; the optimizer is ``ScaledAdamW`` of the same level.
        emulate: see :class:`ScaledLinear`; None: on CPU yes, elsewhere no.
        fp8_eval: see :class:`ScaledLinear`.
        float32_gradients: see :class:`ScaledLinear`. Micro-batches then add up in float32.

    Raises:
        TypeError: a name is not that of an ``nn.Linear`` (subclasses have a forward of their own), or a hook computes
            the weight.
        ValueError: features that are no multiples of 16, or a weight that is shared with a module outside of ``fqns``.
    """
    for fqn in fqns:  # all are checked before one is changed
        _check_linear(fqn, model.get_submodule(fqn))
    _check_ties(model, fqns)
    for fqn in fqns:
        linear = model.get_submodule(fqn)
        if msamp_state_of(linear.weight) is None:  # two layers of `fqns` may have one weight
            assert isinstance(linear.weight, nn.Parameter)
            scale_weight_(linear.weight, level)
        linear.__class__ = ScaledLinear
        assert isinstance(linear, ScaledLinear)
        linear.emulate = linear.weight.device.type == "cpu" if emulate is None else emulate
        linear.fp8_eval, linear.float32_gradients = fp8_eval, float32_gradients


def _check_linear(fqn: str, linear: nn.Module) -> None:
    if type(linear) is not nn.Linear:
        raise TypeError(f"{fqn!r} is a {type(linear).__name__}; expected an nn.Linear. Leave it out of `fqns`.")
    if "weight" not in linear._parameters:
        raise TypeError(
            f"the weight of {fqn!r} is computed at each forward (weight_norm, spectral_norm, pruning); expected a"
            " parameter. Leave it out of `fqns`."
        )
    if linear.in_features % _ALIGNMENT or linear.out_features % _ALIGNMENT:
        raise ValueError(
            f"{fqn!r} has features {linear.in_features} -> {linear.out_features}; expected multiples of"
            f" {_ALIGNMENT}. Leave it out of `fqns`."
        )


def _check_ties(model: nn.Module, fqns: Sequence[str]) -> None:
    """Raise if a module that is not converted shares a weight: its state dict would have codes."""
    owners: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(fqn)
    for fqn in fqns:
        for other in owners[id(model.get_submodule(fqn).weight)]:
            if other not in fqns:
                both = [name for name in (fqn, other) if isinstance(model.get_submodule(name), nn.Linear)]
                raise ValueError(
                    f"the weight of {fqn!r} is that of {other!r} too, which would stay in high precision; expected an"
                    f" untied weight, or that both convert. Keep both: `MSAMP(..., keep={both!r})`."
                )


def scaled_linears(model: nn.Module) -> dict[str, ScaledLinear]:
    """The layers of ``model`` that are converted, by fqn."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, ScaledLinear)}
