"""Weights of Transformer Engine's layers that FSDP2 has gathered as float8: quantised once, and not again.

    scale  = FMAX / amax           # of the whole weight, as Transformer Engine's current scaling computes it
    codes  = saturate(weight * scale).to(e4m3)

Transformer Engine has FP8 parameters of its own, whose shards are e4m3 next to a master in the optimizer: five bytes
per element. Here the float32 shards are the masters, four bytes, and what is gathered, and multiplied with, is the
same; optimizers and checkpoints see float32. Under delayed scaling too the scale is that of the weight as it is: it is
known before anything is sent, and a history or a margin could only make it worse. The history of its amax is kept all
the same, for a run that goes on without FSDP2.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import power_of_two_scale, saturating_cast
from lightning_lowprec.te.fp8_weight import Fp8Weight


@final
class TEWireFormat:
    """Transformer Engine's arithmetic with one scale per tensor.

    Args:
        power_of_two: whether scales are powers of two.
        least_amax: what a smaller largest absolute value is taken for.
    """

    dtype = E4M3.dtype

    def __init__(self, *, power_of_two: bool = False, least_amax: float = 0.0) -> None:
        self.power_of_two = power_of_two
        self.least_amax = least_amax

    def scales(self, amax: Tensor) -> Tensor:
        """(...) -> (...) float32; 1 where ``amax`` is 0 or not finite, the largest float32 where it is too small."""
        amax = amax.float()
        if self.power_of_two:
            return power_of_two_scale(amax, E4M3)
        # of two tensors: torch computes number / tensor by the reciprocal, which rounds twice
        scales = (torch.full_like(amax, E4M3.max) / amax).clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amax.isfinite() & (amax > 0), scales, 1.0)

    def encode(self, values: Tensor, scale: Tensor) -> Tensor:
        """(...) any float -> (...) e4m3."""
        return saturating_cast(values.float() * scale, E4M3)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """A :class:`Fp8Weight`."""
        return Fp8Weight(codes, _inverse(scale), dtype)

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """The codes have come to the same memory; the scale goes where autograd may hold the old one's tensor."""
        assert isinstance(whole, Fp8Weight)
        whole.inv_scale.copy_(_inverse(scale))


def _inverse(scale: Tensor) -> Tensor:
    return scale.reciprocal().reshape(1)


def wire_format_of(recipe: Any) -> TEWireFormat | None:
    """How weights travel under a recipe of Transformer Engine; None: in high precision (see :func:`gather_refusal`)."""
    if gather_refusal(recipe) is not None:
        return None
    if recipe.delayed():
        return TEWireFormat()
    options = recipe.fp8_quant_fwd_weight
    return TEWireFormat(power_of_two=options.power_2_scale, least_amax=options.amax_epsilon)


def gather_refusal(recipe: Any) -> str | None:
    """Why weights cannot travel as float8 under ``recipe``, or None if they can."""
    if not (recipe.delayed() or recipe.float8_current_scaling()):
        return "has no single scale for a weight, and only one per tensor can be gathered"
    if recipe.backward_override == "high_precision":
        return "multiplies by the weights in high precision in the backward pass"
    return None


class _AsFloat8Tensor(torch.autograd.Function):
    """Fp8Weight as Transformer Engine's tensor, sharing the memory; the gradient passes through.

    Its transpose, which Hopper needs for the backward GEMM, belongs to this tensor and goes with the graph: one kept by
    the gathered weight would outlive the gather.
    """

    @staticmethod
    def forward(ctx: Any, weight: Fp8Weight, quantizer: Any) -> Tensor:
        from transformer_engine.pytorch import Float8Tensor

        own = quantizer.copy()
        own.internal = False
        own.set_usage(rowwise=True, columnwise=False)  # the backward asks for the transpose itself
        whole: Tensor = Float8Tensor(
            shape=weight.shape,
            dtype=weight.dtype,
            data=weight.codes.view(torch.uint8),
            fp8_scale_inv=weight.inv_scale,
            fp8_dtype=own.dtype,
            quantizer=own,
            device=weight.device,
        )
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Values(torch.autograd.Function):
    """The values of a Fp8Weight, float32; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, weight: Fp8Weight) -> Tensor:
        return weight.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Transformer Engine's tensors do not trace
def for_gemm(weight: Fp8Weight, quantizer: Any) -> Tensor:
    """The weight as a layer of Transformer Engine takes it.

    Args:
        weight: gathered.
        quantizer: the layer's, of its weight; None outside of FP8.

    Returns:
        A ``Float8Tensor`` of the same codes where the quantizer makes such; else the values, float32.
    """
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer, Float8Quantizer

    if isinstance(quantizer, Float8Quantizer):  # delayed scaling notes what it would have seen
        torch.mul(weight.inv_scale, E4M3.max, out=quantizer.amax)
    if isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer)) and quantizer.dtype == DType.kFloat8E4M3:
        whole: Tensor = _AsFloat8Tensor.apply(weight, quantizer)  # type: ignore[no-untyped-call]
        return whole
    return _Values.apply(weight)  # type: ignore[no-untyped-call, no-any-return]
