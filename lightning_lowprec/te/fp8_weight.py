"""A weight that is e4m3 codes and one scale: a GEMM takes the codes, all other operations see the values.

    weight = codes * inv_scale

No optimizer updates such a weight: it was gathered from shards that are updated, or it does not train and is stored in
FP8 alone. FSDP2 gathers weights as float8 so, and hands the codes to Transformer Engine's GEMMs:

    scale  = FMAX / amax           # of the whole weight, as Transformer Engine's current scaling computes it
    codes  = saturate(weight * scale).to(e4m3)

The float32 shards are the masters; optimizers and checkpoints see float32. Each rank encodes its shard once per
optimizer step. From the first gather to the next write it keeps the codes, one byte more.

Delayed scaling uses the same scale here: the amax is known before anything is sent, and a history or a margin could
only make the scale worse. The history of the amax is kept, for a run that goes on without FSDP2.
"""

from collections.abc import Sequence
from typing import Any, Final, Self, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3, amax, power_of_two_scale, saturating_cast
from lightning_lowprec.numerics.one_pass import in_one_pass
from lightning_lowprec.numerics.tiles import Tile
from lightning_lowprec.private import torch as private
from lightning_lowprec.products.coded_weight import CodedWeight, in_place_of, user_attributes

_aten: Any = torch.ops.aten
_ALIASES: Final = {_aten.detach.default, _aten.as_strided.default, _aten.view.default}  # of the whole tensor


class Fp8Weight(CodedWeight):
    """A tensor subclass that has codes and a scale, and looks like a tensor of ``dtype``; so do its gradients."""

    codes: Tensor
    """(...) float8_e4m3fn."""
    inv_scale: Tensor
    """(1,) float32."""

    @staticmethod
    def __new__(cls, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Self:
        """Make a tensor without storage, and hang codes and scale at it."""
        weight = cls.showing(codes, dtype)
        weight.codes, weight.inv_scale = codes, inv_scale
        return weight

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the codes, and their scale."""
        return self.codes, self.inv_scale.reciprocal().reshape(())

    def decode(self) -> Tensor:
        """Return the values in the dtype that the weight shows."""
        return self.values().to(self.dtype)

    @classmethod
    def on_codes(cls, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep codes for aliases, and for copies to a device; the user's attributes, too, would be lost in a swap."""
        if func in _ALIASES:
            weight = args[0]
            codes, inv_scale, dtype = func(weight.codes, *args[1:], **kwargs), weight.inv_scale, weight.dtype
        elif func is private.MOVING_OPERATIONS[0]:
            weight, dtype = args[0], kwargs.pop("dtype", None) or args[0].dtype
            codes, inv_scale = func(weight.codes, **kwargs), func(weight.inv_scale, **kwargs)
        else:
            return NotImplemented
        alike = type(weight)(codes, inv_scale, dtype)
        vars(alike).update(user_attributes(weight))
        return alike

    # torch's setter would change the size and the dtype that the weight shows, and leave the codes
    data = property(
        lambda self: self.detach(),
        lambda self, values: self.write(_aten.copy_.default, (self, values), {}, [self]),
    )

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the codes and the scale; ``clone()`` returns the values instead, which can be written to."""
        memo[id(self)] = in_place_of(self, type(self)(self.codes.clone(), self.inv_scale.clone(), self.dtype))
        return memo[id(self)]

    def values(self) -> Tensor:
        """Return the exact values: (...) float32."""
        return self.codes.float() * self.inv_scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "inv_scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Self:
        return cls(inner["codes"], inner["inv_scale"], dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, inv_scale={self.inv_scale.item():.3e})"


@final
class FrozenWeight(Fp8Weight):
    """A weight that does not train, stored in FP8 alone: one byte per element.

    The scale is a power of two, so float32 and bf16 hold the values exactly and give the same codes again: the weight
    passes through checkpoints and other ranks unchanged. It can take new values; small updates in place are refused,
    because e4m3 would round them away.
    """

    @classmethod
    @torch.no_grad()
    def write(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Any]) -> Any:
        """Take new values: (...) any float; refuse any operation but a copy."""
        if func is not _aten.copy_.default:
            raise RuntimeError(
                f"{func} would update a weight that is frozen and kept in FP8 alone (`fp8_params=True`). Let it train"
                " before the model is set up, or set it up without `fp8_params`; new values are taken by `weight.data ="
                " values`, a state dict, or PEFT's merge with `safe_merge=True`."
            )
        weight, values = args[:2]
        codes, inv_scale = _with_own_scale(values)
        weight.codes.copy_(codes)
        weight.inv_scale.copy_(inv_scale)
        return weight


def encode(values: Tensor, scale: Tensor) -> Tensor:
    """(...) any float, a scale -> (...) e4m3, saturated; inf becomes NaN."""
    return saturating_cast(values.float() * scale, E4M3)


def _with_own_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """(...) any float -> codes, and their inv_scale, (1,) float32."""
    if isinstance(values, Fp8Weight):
        values = values.values()
    scale = power_of_two_scale(amax(values), E4M3)
    return encode(values, scale), scale.reciprocal().reshape(1)


@torch.no_grad()
def store_in_fp8(layer: Any, device: torch.device) -> None:
    """Store the layer's weight, which does not train, in FP8 alone, on ``device``; the Parameter stays the same."""
    weight = layer.weight
    _swap(weight, FrozenWeight(*_with_own_scale(weight.detach().to(device)), weight.dtype))


@torch.no_grad()
def store_in_full(layer: Any) -> None:
    """Store a :class:`FrozenWeight` as plain values again, in the dtype that it has shown; leave any other weight."""
    weight = layer.weight
    if isinstance(weight, FrozenWeight):
        _swap(weight, weight.values().to(weight.dtype))


def _swap(param: Any, tensor: Tensor) -> None:
    """Give the same Parameter object other data, and keep the user's attributes."""
    torch.utils.swap_tensors(param, in_place_of(param, tensor))  # type: ignore[no-untyped-call]


@final
class TEWireFormat:
    """The arithmetic of Transformer Engine's recipes that have one scale per tensor, as FSDP2 asks for it."""

    dtype = E4M3.dtype
    tile: Tile | None = None
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

    def encode(self, values: Tensor, scale: Tensor, *, first: int = 0, out: Tensor | None = None) -> Tensor:
        """(...) any float -> (...) e4m3; inf becomes NaN."""
        return in_one_pass(encode, values, scale, out=out)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered weight."""
        return Fp8Weight(codes, scale.reciprocal().reshape(1), dtype)

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Update the scale in place, where autograd may hold it; new codes are already in the same memory."""
        assert isinstance(whole, Fp8Weight)
        whole.inv_scale.copy_(scale.reciprocal())


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
