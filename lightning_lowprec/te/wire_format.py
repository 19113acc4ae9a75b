"""Gather the weights of Transformer Engine's layers as float8 under FSDP2, and hand the codes to its GEMMs.

    scale  = FMAX / amax           # of the whole weight, as Transformer Engine's current scaling computes it
    codes  = saturate(weight * scale).to(e4m3)

The float32 shards are the masters, four bytes per element; optimizers and checkpoints see float32. (Transformer
Engine's own FP8 parameters take five all the time: e4m3 shards next to float32 masters in the optimizer.) Each rank
encodes its shard once per optimizer step. From the first gather to the next write it keeps the codes, one byte more.

Delayed scaling uses the same scale here: the amax is known before anything is sent, and a history or a margin could
only make the scale worse. The history of the amax is kept, for a run that goes on without FSDP2.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.one_pass import in_one_pass
from lightning_lowprec.numerics.scaling import power_of_two_scale, saturating_cast
from lightning_lowprec.te.fp8_weight import Fp8Weight


@final
class TEWireFormat:
    """The arithmetic of Transformer Engine's recipes that have one scale per tensor, as FSDP2 asks for it."""

    dtype = E4M3.dtype
    per_step = True

    def __init__(self, *, power_of_two: bool = False, least_amax: float = 0.0) -> None:
        self.power_of_two = power_of_two
        self.least_amax = least_amax

    def scales(self, amax: Tensor) -> Tensor:
        """(...) -> (...) float32; 1 where ``amax`` is 0 or not finite, the largest float32 where it is too small."""
        amax = amax.float()
        if self.power_of_two:
            return power_of_two_scale(amax, E4M3)
        # a tensor by a tensor: torch computes number / tensor by the reciprocal, which rounds twice
        scales = (torch.full_like(amax, E4M3.max) / amax).clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amax.isfinite() & (amax > 0), scales, 1.0)

    def encode(self, values: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(...) any float -> (...) e4m3; inf becomes NaN."""
        return in_one_pass(_encode, values, scale, out=out)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered weight."""
        return Fp8Weight(codes, scale.reciprocal().reshape(1), dtype)

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Update the scale in place, where autograd may hold it; new codes are already in the same memory."""
        assert isinstance(whole, Fp8Weight)
        whole.inv_scale.copy_(scale.reciprocal())


def _encode(values: Tensor, scale: Tensor) -> Tensor:
    return saturating_cast(values.float() * scale, E4M3)


def wire_format_of(recipe: Any) -> TEWireFormat | None:
    """Return the wire format of weights under a recipe; None if weights are gathered in high precision."""
    if gather_refusal(recipe) is not None:
        return None
    if recipe.delayed():
        return TEWireFormat()
    options = recipe.fp8_quant_fwd_weight
    return TEWireFormat(power_of_two=options.power_2_scale, least_amax=options.amax_epsilon)


def gather_refusal(recipe: Any) -> str | None:
    """Return the reason why weights cannot be gathered as float8 under ``recipe``, or None if they can."""
    if not (recipe.delayed() or recipe.float8_current_scaling()):
        return "has no single scale for a weight, and only one per tensor can be gathered"
    if recipe.backward_override == "high_precision":
        return "multiplies by the weights in high precision in the backward pass"
    return None


@final
class _ForGemm(torch.autograd.Function):
    """Make a tensor of Transformer Engine that shares the memory of an Fp8Weight, or without a quantizer the values.

    The gradient passes through. The transpose, which Hopper needs for the backward GEMM, belongs to the new tensor and
    is freed with the graph. A transpose that belonged to the gathered weight would outlive the gather.
    """

    @staticmethod
    def forward(ctx: Any, weight: Fp8Weight, quantizer: Any) -> Tensor:
        if quantizer is None:
            return weight.values()
        from transformer_engine.pytorch import Float8Tensor

        copied = quantizer.copy()
        copied.internal = False
        copied.set_usage(rowwise=True, columnwise=False)  # the backward asks for the transpose itself
        made: Tensor = Float8Tensor(
            shape=weight.shape,
            dtype=weight.dtype,
            data=weight.codes.view(torch.uint8),
            fp8_scale_inv=weight.inv_scale,
            fp8_dtype=copied.dtype,
            quantizer=copied,
            device=weight.device,
        )
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Transformer Engine's tensors do not trace
def for_gemm(weight: Fp8Weight, quantizer: Any) -> Tensor:
    """Return the weight as a layer of Transformer Engine takes it, whose ``quantizer`` is None outside of FP8.

    This is a ``Float8Tensor`` of the same codes, if the quantizer makes such tensors in e4m3; else the values, float32.
    """
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer, Float8Quantizer

    if isinstance(quantizer, Float8Quantizer):  # delayed scaling notes the amax of the weight
        torch.mul(weight.inv_scale, E4M3.max, out=quantizer.amax)
    elif not isinstance(quantizer, Float8CurrentScalingQuantizer):
        quantizer = None
    if quantizer is not None and quantizer.dtype != DType.kFloat8E4M3:
        quantizer = None
    return _ForGemm.apply(weight, quantizer)  # type: ignore[no-untyped-call, no-any-return]
