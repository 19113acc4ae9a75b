"""The format in which FSDP2 gathers weights for torchao's layers as float8. Importing this module imports torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig
from torchao.float8.float8_utils import EPS

from lightning_lowprec.numerics.one_pass import in_one_pass
from lightning_lowprec.private.torchao import set_scale
from lightning_lowprec.torchao.gathered_weight import GatheredWeight


@dataclass(frozen=True)
class TorchAOWire:
    """torchao's arithmetic, and the tensor that its matmuls take for one that is quantised already."""

    mm_config: LinearMMConfig
    """torchao's settings of the three GEMMs, the same for all layers of a model that are gathered as float8."""
    dtype: torch.dtype
    per_step: bool
    least_amax: ClassVar[float] = EPS

    @classmethod
    def of(cls, config: Float8LinearConfig, *, per_step: bool) -> TorchAOWire:
        """Return the format of layers with this configuration, whose weight has one scale."""
        with torch.device("meta"):
            made = Float8Linear(1, 1, bias=False, config=config)  # type: ignore[no-untyped-call]
        dtype = config.cast_config_weight.target_dtype
        assert dtype is not None
        return cls(made.linear_mm_config, dtype, per_step)

    def scales(self, amax: Tensor) -> Tensor:
        """Return ``FMAX / amax``, computed in float64: so eager and compiled code agree."""
        scales = torch.finfo(self.dtype).max / amax.to(torch.float64)
        if amax.dtype == torch.float16:
            scales = scales.clamp(max=torch.finfo(torch.float16).max)
        return scales.to(torch.float32)

    def encode(self, values: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(...) any float -> (...) float8; inf becomes the largest value."""
        return in_one_pass(_encode, values, scale, self.dtype, out=out)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered weight."""
        whole: Tensor = GatheredWeight(codes, scale, dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return whole

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Update the scale; new codes are already in the same memory."""
        set_scale(whole, scale)


def _encode(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes that torchao's ``hp_tensor_and_scale_to_float8`` computes."""
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype)
