"""Layers whose three products run on codes of int8 or MXFP8, which are made at every product: there is no state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.conversion.gemms import GEMMS, Gemm, InBF16
from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.transforms import check_call
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.torchao_prototype.arithmetic import Kind
from lightning_lowprec.torchao_prototype.products import Products


class PrototypeLayer(PlainFirst):
    """The work of a Linear, for any batch, under autocast of any device."""

    in_by_out: ClassVar[bool]
    """Whether the weight is stored as [K, N], instead of [N, K]."""
    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    arithmetic: Kind
    low_eval: bool
    """Whether evaluation runs on codes too."""
    own_gemms: InBF16
    """The products that the recipe of the layer computes in high precision."""
    phase_gemms: InBF16
    """The products that the phase of a schedule computes in high precision."""
    in_high: tuple[Gemm, ...]
    """The products in high precision, of recipe and phase together."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self._plain(input)  # raises as nn.Linear does
        in_high = self.in_high
        if not (self.training or self.low_eval) or input.numel() == 0 or len(in_high) == len(GEMMS):
            return self._plain(input)
        # in eager inference mode torchao's tensors meet operations that they do not know
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call(type(self).__name__)
        if isinstance(self.weight, DTensor):
            raise RuntimeError(
                f"{type(self).__name__} does not run with tensor parallelism, which cuts the weight (got a DTensor of"
                f" shape {tuple(self.weight.shape)}). Use 'fp8-tensorwise', or keep what is cut (`keep=[...]`)."
            )
        output: Tensor = Products.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.arithmetic, in_high, self.in_by_out
        )
        return output

    @abstractmethod
    def _plain(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted."""

    def check_trace(self) -> None:
        """Refuse ``torch.jit.trace`` where the layer computes on codes."""
        if self.training or self.low_eval:
            check_call(type(self).__name__)

    def update(self) -> None:
        """Bring ``in_high`` up to date after a change of ``own_gemms`` or ``phase_gemms``."""
        self.in_high = tuple(sorted(self.own_gemms | self.phase_gemms))


@final
class PrototypeLinear(PrototypeLayer, nn.Linear):
    """A Linear whose products run on codes."""

    in_by_out = False

    def _plain(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the sizes, as Linear does, and the arithmetic."""
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}"
