"""The gradient of a parameter of codes: one byte per element and a scale, at ``param.grad`` like any other gradient.

Other code sees a float32 tensor: ``torch.nn.utils.clip_grad_norm_``, gradient scalers, ``zero_grad`` of models and
optimizers, and loggers of norms work on it. Multiplying by a number changes only the scale. Other operations see the
decoded values; operations in place encode their result with a fresh amax.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3, amax, power_of_two_scale, saturating_cast
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.private import torch as private

_aten: Any = torch.ops.aten


class Stage(IntEnum):
    """Where a gradient is between backward and step. Under DDP, clipping must come after averaging."""

    AVERAGED = 0
    """It is the average over the ranks."""
    OWN = 1
    """It is the gradient of this rank."""
    MEASURED = 2
    """Its norm was taken on this rank."""
    CLIPPED = 3
    """It was then multiplied by a tensor, as by ``torch.nn.utils.clip_grad_norm_``."""


@final
class ScaledGradient(Tensor):
    """``codes * inv_scale``, shown as a float32 tensor."""

    codes: Tensor
    """(...) float8_e4m3fn."""
    inv_scale: Tensor
    """Scalar float32; NaN where the gradient has a value that is not finite."""
    stage: Stage

    @staticmethod
    def __new__(cls, codes: Tensor, inv_scale: Tensor, stage: Stage = Stage.OWN) -> "ScaledGradient":
        """Make a tensor without memory for float32 values."""
        gradient: ScaledGradient = private.make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )
        gradient.codes, gradient.inv_scale, gradient.stage = codes, inv_scale, stage
        return gradient

    def __tensor_flatten__(self) -> tuple[list[str], Stage]:
        return ["codes", "inv_scale"], self.stage

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], stage: Stage, size: object, stride: object) -> "ScaledGradient":
        return ScaledGradient(inner["codes"], inner["inv_scale"], stage)

    @classmethod
    @torch.no_grad()
    def of(cls, values: Tensor, stage: Stage = Stage.OWN) -> "ScaledGradient":
        """Encode (...) any float with the scale of its amax; one value that is not finite makes all values NaN."""
        return cls(*_encode(values.float()), stage)

    def decode(self) -> Tensor:
        """Return the values: (...) float32."""
        return self.codes.float() * self.inv_scale

    def set_values_(self, values: Tensor) -> None:
        """Encode other values, (...) float32, in place."""
        codes, inv_scale = _encode(values)
        self.codes.copy_(codes)
        self.inv_scale.copy_(inv_scale)
        self.stage = max(self.stage, Stage.OWN)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, inv_scale={self.inv_scale}, codes={self.codes})"

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Run the operations of ``_HANDLERS`` on codes and scales, and other operations on decoded values."""
        return _HANDLERS.get(func, _on_values)(func, args, kwargs or {})


@compiled_on_cuda
def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and inv_scale: (...) float32 -> (...) float8_e4m3fn, scalar float32."""
    largest = amax(values)
    scale = torch.where(largest.isfinite(), power_of_two_scale(largest, E4M3), torch.nan)
    return saturating_cast(values * scale, E4M3), scale.reciprocal()


@compiled_on_cuda
def _accumulate_(codes: Tensor, inv_scale: Tensor, other: Tensor, other_inv_scale: Tensor) -> None:
    new_codes, new_inv_scale = _encode(codes.float() * inv_scale + other.float() * other_inv_scale)
    codes.copy_(new_codes)
    inv_scale.copy_(new_inv_scale)


@compiled_on_cuda
def _norm_of(codes: Tensor, inv_scale: Tensor, order: float = 2.0) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(codes.float() * inv_scale, order)
    return norm


def _gradients_in(value: object) -> list[ScaledGradient]:
    return [v for v in private.tree_leaves(value) if isinstance(v, ScaledGradient)]


def _returned(first: object) -> Any:
    return first if isinstance(first, Tensor) else None  # operations in place on lists return nothing


# ---- operations: (func, args, kwargs) -> result


def _on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run any operation on decoded values, and encode what it wrote to gradients; refuse optimizers without codes."""
    targets = private.tree_leaves(args[0])
    writes = bool(private.written_arguments(func, args, kwargs))
    writes_others = writes and func not in _COPIES and len(targets) > len(_gradients_in(targets))
    if func is _aten.add_.Tensor and private.is_in_backward():  # autograd adds it to a gradient in float32
        writes_others = False
    reads_weight = any(hasattr(t, "msamp_state") for t in private.tree_leaves((args, kwargs)))
    if writes_others or (reads_weight and func is not _aten.mul.Tensor):
        raise TypeError(
            f"{func} got the gradient of a weight that is kept as codes with a scale (MS-AMP) and would change another"
            " tensor by it, as optimizers do that do not know codes. AdamW, too, can step codes only where MS-AMP"
            " has converted it, that is, under `precision='msamp-o2'` (or o1, o3); without Lightning use"
            " `lightning_lowprec.msamp.ScaledAdamW`. If the codes come from an earlier run, and this run has another"
            " precision, give the model float32 weights back before:"
            " `lightning_lowprec.plain(model)`."
        )
    values, options = private.tree_map_only(ScaledGradient, ScaledGradient.decode, (args, kwargs))
    output = func(*values, **options)
    if not writes:
        return output
    for target, value in zip(targets, private.tree_leaves(values[0]), strict=True):
        if isinstance(target, ScaledGradient):
            target.set_values_(value)
    return _returned(args[0])


def _on_codes_and_scale(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScaledGradient:
    gradient: ScaledGradient = args[0]
    return ScaledGradient(func(gradient.codes, **kwargs), func(gradient.inv_scale, **kwargs), gradient.stage)


def _multiply_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Multiply or divide the scales, if every gradient is multiplied by one number."""
    if any(isinstance(factor, Tensor) and factor.numel() != 1 for factor in args[1:]):
        return _on_values(func, args, kwargs)
    for gradient in _gradients_in(args[0]):
        if gradient.stage is Stage.MEASURED and isinstance(args[1], Tensor) and func is not private.ATEN_UNSCALE:
            gradient.stage = Stage.CLIPPED
    scales = private.tree_map_only(ScaledGradient, lambda gradient: gradient.inv_scale, args[0])
    func(scales, *args[1:], **kwargs)
    return _returned(args[0])


def _norm(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for gradient in _gradients_in(args[0]):
        if gradient.stage is Stage.OWN:
            gradient.stage = Stage.MEASURED
    gradient, options = args[0], (*args[2:], *kwargs.values())
    if func is _aten.linalg_vector_norm.default and gradient.is_cuda and not any(options):
        return _norm_of(gradient.codes, gradient.inv_scale, *args[1:])  # without memory for values
    return _on_values(func, args, kwargs)


def _add(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Add gradients, as autograd does for a weight that is used twice, and in place in the second micro-batch."""
    if kwargs or not all(isinstance(arg, ScaledGradient) for arg in args):
        return _on_values(func, args, kwargs)
    target, other = args
    if func is _aten.add.Tensor:
        target = ScaledGradient(target.codes.clone(), target.inv_scale.clone(), target.stage)
    _accumulate_(target.codes, target.inv_scale, other.codes, other.inv_scale)
    target.stage = max(target.stage, other.stage, Stage.OWN)
    return target


def _zero_(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for tensor in private.tree_leaves(args[0]):
        if isinstance(tensor, ScaledGradient):
            tensor.inv_scale.fill_(1.0)  # it may be NaN
            tensor.stage = min(tensor.stage, Stage.OWN)
            tensor = tensor.codes
        tensor.zero_()
    return _returned(args[0])


_COPIES: Final = (_aten.copy_.default, private.ATEN_FOREACH_COPY)
_HANDLERS: Final = {
    _aten.detach.default: _on_codes_and_scale,
    _aten.clone.default: _on_codes_and_scale,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add,
    _aten.zero_.default: _zero_,
    private.ATEN_FOREACH_ZERO: _zero_,
    _aten.linalg_vector_norm.default: _norm,
    private.ATEN_FOREACH_NORM: _norm,
    **dict.fromkeys((_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar), _multiply_),
    **dict.fromkeys((*private.ATEN_FOREACH_MULTIPLY, private.ATEN_UNSCALE), _multiply_),
}
