"""The format in which FSDP2 gathers weights for torchao's layers as float8. Importing this module imports torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import GemmInputRole

from lightning_lowprec.numerics.one_pass import in_one_pass
from lightning_lowprec.numerics.scaling import encode
from lightning_lowprec.private.torchao import set_scale
from lightning_lowprec.products.scaled import LEAST_AMAX, Coding
from lightning_lowprec.torchao.gathered_weight import GatheredWeight


@dataclass(frozen=True)
class TorchAOWire:
    """The arithmetic of the layers, and the tensor that holds a weight's codes."""

    mm_config: Any
    """torchao's settings of the three GEMMs, the same for all layers of a model that are gathered as float8."""
    coding: Coding
    per_step: bool
    least_amax: ClassVar[float] = LEAST_AMAX

    @property
    def dtype(self) -> torch.dtype:
        """The float8 format."""
        return self.coding.dtype

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of largest absolute values."""
        return self.coding.scales(amax)

    def encode(self, values: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(...) any float -> (...) float8; inf becomes the largest value."""
        return in_one_pass(encode, values, scale, self.dtype, out=out)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered weight."""
        whole: Tensor = GatheredWeight(codes, scale, dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return whole

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Update the scale; new codes are already in the same memory."""
        set_scale(whole, scale)
