"""A layer whose weight is kept as codes and whose three GEMMs run in FP8 (MS-AMP, arXiv 2310.18313).

Every tensor has one power-of-two scale, from its amax. Between forward and backward a layer keeps the codes of the
input, one byte per element. The gradient of the weight is a ``ScaledGradient``, also one byte per element. The products
are in :mod:`~lightning_lowprec.msamp.matmul`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.msamp.matmul import ScaledMatmul
from lightning_lowprec.msamp.weight import move_, required_state_of, values_of
from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.private.torch import are_transforms_active, is_tracing
from lightning_lowprec.products.transforms import KEEP, check_call

ALIGNMENT: Final = 16
"""FP8 kernels need inner dimensions that are multiples of 16."""


class ScaledLayer(PlainFirst):
    """A layer that does a Linear's work, after ``scale_linears``; its state dict is the plain layer's, in float32."""

    in_by_out: ClassVar[bool]
    """Whether the weight is stored as [K, N], instead of [N, K]."""
    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    emulate: bool
    """Multiply dequantised codes in float32, instead of running FP8 kernels."""
    fp8_eval: bool
    """Multiply in FP8 in evaluation without gradients too, instead of with the exact values of the weight."""
    float32_gradients: bool
    """Give the weight a float32 gradient, instead of a ScaledGradient."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype; without autocast, in the dtype of the input."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self._plain(input, self.weight)  # raises as the plain layer does
        if not (self.training or self.fp8_eval or torch.is_grad_enabled()):
            return self._plain(input, values_of(self.weight).to(input.dtype))
        if are_transforms_active() or torch.compiler.is_exporting() or is_tracing():
            check_call("ScaledLinear (MS-AMP)", KEEP)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        fits = input.numel() // self.in_features % ALIGNMENT == 0  # a slice of all rows would be copied in backward
        rows = input.reshape(-1, self.in_features) if fits else pad_rows(input, ALIGNMENT)
        options = self.emulate, self.float32_gradients, self.in_by_out
        output: Tensor = ScaledMatmul.apply(rows, self.weight, *options)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], self.out_features) if fits else cut_rows(output, input)

    @abstractmethod
    def _plain(self, input: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a weight that is no codes, as the layer did before it was converted."""

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledLayer:
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
