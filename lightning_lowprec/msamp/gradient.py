"""The gradient of a parameter of codes: one byte per element and a scale, at ``param.grad`` like any other gradient.

Other code sees a float32 tensor: ``torch.nn.utils.clip_grad_norm_``, gradient scalers, ``zero_grad`` of models and
optimizers, and loggers of norms work on it. Multiplying by a number changes only the scale. Other operations see the
decoded values; operations in place encode their result with a fresh amax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast
from lightning_lowprec.private import torch as private

_aten: Any = torch.ops.aten
_COPIES: Final = (_aten.copy_.default, private.ATEN_FOREACH_COPY)


@final
class ScaledGradient(Tensor):
    """``codes * inv_scale``, shown as a float32 tensor.

    Args:
        codes: (...) float8_e4m3fn.
        inv_scale: scalar float32; NaN where the gradient has a value that is not finite.
    """

    codes: Tensor
    inv_scale: Tensor
    averaged: bool
    """Whether it is the average over the ranks already."""
    measured: bool
    """Whether its norm was taken."""
    clipped: bool
    """Whether it was multiplied by a tensor after its norm was taken, as by ``torch.nn.utils.clip_grad_norm_``."""

    @staticmethod
    def __new__(cls, codes: Tensor, inv_scale: Tensor) -> ScaledGradient:
        """Make a tensor without memory for float32 values."""
        gradient: ScaledGradient = private.make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )
        gradient.codes, gradient.inv_scale = codes, inv_scale
        gradient.averaged = gradient.measured = gradient.clipped = False
        return gradient

    @classmethod
    @torch.no_grad()
    def of(cls, values: Tensor) -> ScaledGradient:
        """Encode (...) any float with the scale of its amax; one value that is not finite makes all values NaN."""
        return cls(*_encode(values.float()))

    def decode(self) -> Tensor:
        """Return the values: (...) float32."""
        return self.codes.float() * self.inv_scale

    def set_values_(self, values: Tensor) -> None:
        """Encode other values, (...) float32, in place."""
        codes, inv_scale = _encode(values)
        self.codes.copy_(codes)
        self.inv_scale.copy_(inv_scale)
        self.averaged = False

    def set_zero_(self) -> None:
        """Make all values 0, also if the scale is NaN."""
        self.codes.zero_()
        self.inv_scale.fill_(1.0)
        self.measured = self.clipped = False

    def to_device(self, device: torch.device) -> ScaledGradient:
        """Return a copy on another device."""
        return ScaledGradient(self.codes.to(device), self.inv_scale.to(device))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors, for torch."""
        return ["codes", "inv_scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _: None, *size_and_stride: Any) -> ScaledGradient:
        """Make a gradient of inner tensors, for torch."""
        return ScaledGradient(parts["codes"], parts["inv_scale"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show the shape and the inner tensors."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, inv_scale={self.inv_scale}, codes={self.codes})"

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operations of ``_HANDLERS`` on codes and scales, and other operations on decoded values."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if any(hasattr(t, "msamp_state") for arg in (*args, *kwargs.values()) for t in _as_list(arg)):
            raise TypeError(_refusal(func))
        writes = bool(private.written_arguments(func, args, kwargs))
        targets = _as_list(args[0])
        if writes and func not in _COPIES and not all(isinstance(t, ScaledGradient) for t in targets):
            raise TypeError(_refusal(func))
        values = [_decoded(arg) for arg in args]
        output = func(*values, **{name: _decoded(value) for name, value in kwargs.items()})
        if not writes:
            return output
        for target, value in zip(targets, _as_list(values[0]), strict=True):
            if isinstance(target, ScaledGradient):
                target.set_values_(value)
        return _returned(args[0])


def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    largest = amax(values)
    scale = torch.where(largest.isfinite(), power_of_two_scale(largest, E4M3), torch.nan)
    return saturating_cast(values * scale, E4M3), scale.reciprocal()


def _decoded(value: Any) -> Any:
    if isinstance(value, ScaledGradient):
        return value.decode()
    return [_decoded(v) for v in value] if isinstance(value, (list, tuple)) else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _gradients_in(value: Any) -> list[ScaledGradient]:
    return [v for v in _as_list(value) if isinstance(v, ScaledGradient)]


def _returned(first: Any) -> Any:
    """Return the result of an operation in place: its first argument, or None if that is a list."""
    return first if isinstance(first, Tensor) else None


def _refusal(func: Any) -> str:
    """Return the message for an optimizer that takes the codes of a weight for the weight."""
    return (
        f"{func} got the gradient of a weight that is kept as codes with a scale (MS-AMP) and would change another"
        " tensor by it, as optimizers do that take codes for weights. Use `torch.optim.AdamW` under"
        " `precision='msamp-o2'` (or o1, o3), or `lightning_lowprec.msamp.adamw.ScaledAdamW`."
    )


# ---- operations on codes and scales; NotImplemented: on decoded values after all


def _detach(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScaledGradient:
    return ScaledGradient(args[0].codes, args[0].inv_scale)


def _clone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScaledGradient:
    copied = ScaledGradient(args[0].codes.clone(**kwargs), args[0].inv_scale.clone())
    copied.averaged = args[0].averaged
    return copied


def _multiply_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Multiply or divide the scales, if every gradient is multiplied by one number."""
    if not all(map(_is_number, args[1:])):
        return NotImplemented
    if isinstance(args[1], Tensor) and func is not private.ATEN_UNSCALE:
        for gradient in _gradients_in(args[0]):
            gradient.clipped = gradient.measured and not gradient.averaged
    factors = [t.inv_scale if isinstance(t, ScaledGradient) else t for t in _as_list(args[0])]
    func(factors if isinstance(args[0], (list, tuple)) else factors[0], *args[1:], **kwargs)
    return _returned(args[0])


def _is_number(value: Any) -> bool:
    """Whether ``value`` is one number, or a list of one number per tensor."""
    if isinstance(value, (list, tuple)):
        return not any(isinstance(v, Tensor) for v in value)
    return not isinstance(value, Tensor) or value.numel() == 1


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for gradient in _gradients_in(args[0]):
        gradient.measured = True
    return NotImplemented


def _add(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Add two gradients of one weight, as autograd does for a weight that is used twice."""
    if kwargs or not all(isinstance(arg, ScaledGradient) for arg in args):
        return NotImplemented
    total = ScaledGradient.of(args[0].decode() + args[1].decode())
    total.clipped = args[0].clipped or args[1].clipped
    return total


def _zero_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for tensor in _as_list(args[0]):
        if isinstance(tensor, ScaledGradient):
            tensor.set_zero_()
        else:
            tensor.zero_()
    return _returned(args[0])


_MULTIPLICATIONS: Final = (
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    *private.ATEN_FOREACH_MULTIPLY,
    private.ATEN_UNSCALE,
)
_HANDLERS: Final[dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = {
    _aten.detach.default: _detach,
    _aten.clone.default: _clone,
    _aten.add.Tensor: _add,
    _aten.zero_.default: _zero_,
    private.ATEN_FOREACH_ZERO: _zero_,
    _aten.linalg_vector_norm.default: _norm,
    private.ATEN_FOREACH_NORM: _norm,
    **dict.fromkeys(_MULTIPLICATIONS, _multiply_),
}
