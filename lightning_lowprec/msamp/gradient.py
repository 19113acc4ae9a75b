"""The gradient of a parameter of codes: one byte per element and a scale, at ``param.grad`` like any other gradient.

For everybody else it is a float32 tensor: ``torch.nn.utils.clip_grad_norm_``, gradient scalers, ``zero_grad`` of model
or optimizer, and whoever logs norms take it as it is. Multiplying by a number changes only the scale; other operations
see the decoded values, and one in place encodes its result with a fresh amax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast

_aten: Any = torch.ops.aten
_UNSCALE: Any = _aten._amp_foreach_non_finite_check_and_unscale_.default


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
    """Whether somebody took its norm."""
    clipped: bool
    """Whether it was multiplied by a tensor after that, as ``torch.nn.utils.clip_grad_norm_`` does."""

    @staticmethod
    def __new__(cls, codes: Tensor, inv_scale: Tensor) -> ScaledGradient:
        """A tensor without memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        gradient: ScaledGradient = make(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )
        gradient.codes, gradient.inv_scale = codes, inv_scale
        gradient.averaged = gradient.measured = gradient.clipped = False
        return gradient

    @classmethod
    @torch.no_grad()
    def of(cls, values: Tensor) -> ScaledGradient:
        """Encode (...) any float, with the scale of its amax; one value that is not finite makes all of it NaN."""
        codes, inv_scale = _encode(values.float())
        return cls(codes, inv_scale)

    def decode(self) -> Tensor:
        """The values: (...) float32."""
        return self.codes.float() * self.inv_scale

    def to_device(self, device: torch.device) -> ScaledGradient:
        """The same on another device."""
        return ScaledGradient(self.codes.to(device), self.inv_scale.to(device))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The names of the parts, as torch's subclasses tell them."""
        return ["codes", "inv_scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _: None, *size_and_stride: Any) -> ScaledGradient:
        """From the parts."""
        return ScaledGradient(parts["codes"], parts["inv_scale"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape and the two parts."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, inv_scale={self.inv_scale}, codes={self.codes})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Operations of ``_SPECIAL`` as they say there; others on decoded values."""
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        result = NotImplemented if special is None else special(func, args, kwargs)
        if result is not NotImplemented:
            return result
        _check_meeting(func, (*args, *kwargs.values()))
        if not func._schema.is_mutable:
            return func(*map(_decoded, args), **{name: _decoded(value) for name, value in kwargs.items()})
        targets = _listed(args[0])
        if not all(isinstance(t, ScaledGradient) for t in targets):
            if func in (_aten.copy_.default, _aten._foreach_copy_.default):
                func(args[0], *map(_decoded, args[1:]), **kwargs)
                return _mutated(args[0])
            raise TypeError(_stranger(func))
        values = _decoded(args[0])
        func(values, *map(_decoded, args[1:]), **{name: _decoded(value) for name, value in kwargs.items()})
        for target, value in zip(targets, _listed(values), strict=True):
            codes, inv_scale = _encode(value)
            target.codes.copy_(codes)
            target.inv_scale.copy_(inv_scale)
            target.averaged = False
        return _mutated(args[0])


def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    largest = amax(values)
    scale = torch.where(largest.isfinite(), power_of_two_scale(largest, E4M3), torch.nan)
    return saturating_cast(values * scale, E4M3), scale.reciprocal()


def _decoded(value: Any) -> Any:
    if isinstance(value, ScaledGradient):
        return value.decode()
    return [_decoded(v) for v in value] if isinstance(value, (list, tuple)) else value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _scaled_in(value: Any) -> list[ScaledGradient]:
    return [v for v in _listed(value) if isinstance(v, ScaledGradient)]


def _mutated(first: Any) -> Any:
    """What an operation in place returns: operations on lists nothing."""
    return first if isinstance(first, Tensor) else None


def _is_number(value: Any) -> bool:
    """Whether multiplying by it is multiplying by one number per tensor."""
    if isinstance(value, (list, tuple)):
        return not any(isinstance(v, Tensor) for v in value)
    return not isinstance(value, Tensor) or value.numel() == 1


def _share(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScaledGradient:
    return ScaledGradient(args[0].codes, args[0].inv_scale)


def _clone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScaledGradient:
    copied = ScaledGradient(args[0].codes.clone(**kwargs), args[0].inv_scale.clone())
    copied.averaged = args[0].averaged
    return copied


def _on_scales(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """In place, on the scales instead of the values, where all of a tensor is multiplied by one number."""
    first = args[0]
    if not all(map(_is_number, args[1:])):
        return NotImplemented
    if isinstance(args[1], Tensor) and func is not _UNSCALE:
        for gradient in _scaled_in(first):
            gradient.clipped = gradient.measured and not gradient.averaged
    func([_scale_of(t) for t in first] if isinstance(first, (list, tuple)) else _scale_of(first), *args[1:], **kwargs)
    return _mutated(first)


def _scale_of(tensor: Tensor) -> Tensor:
    return tensor.inv_scale if isinstance(tensor, ScaledGradient) else tensor


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for gradient in _scaled_in(args[0]):
        gradient.measured = True
    return NotImplemented


def _add(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What autograd does with the gradients of a weight that is used twice."""
    if kwargs or not all(isinstance(arg, ScaledGradient) for arg in args):
        return NotImplemented
    total = ScaledGradient.of(args[0].decode() + args[1].decode())
    total.clipped = args[0].clipped or args[1].clipped
    return total


def _zero(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for tensor in _listed(args[0]):
        if isinstance(tensor, ScaledGradient):
            tensor.codes.zero_()
            tensor.inv_scale.fill_(1.0)
            tensor.measured = tensor.clipped = False
        else:
            tensor.zero_()
    return _mutated(args[0])


_SPECIAL: Final[dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = {
    _aten.detach.default: _share,
    _aten.clone.default: _clone,
    _aten.add.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norm,
    **dict.fromkeys(
        (
            _aten.mul_.Tensor,
            _aten.mul_.Scalar,
            _aten.div_.Tensor,
            _aten.div_.Scalar,
            _aten._foreach_mul_.Scalar,
            _aten._foreach_mul_.ScalarList,
            _aten._foreach_mul_.Tensor,
            _aten._foreach_div_.Scalar,
            _aten._foreach_div_.ScalarList,
            _aten._foreach_div_.Tensor,
            _UNSCALE,
        ),
        _on_scales,
    ),
}


def _check_meeting(func: Any, args: Sequence[Any]) -> None:
    """Raise where a gradient meets codes: an optimizer is at work that takes the codes for weights."""
    if any(getattr(t, "msamp_state", None) is not None for arg in args for t in _listed(arg)):
        raise TypeError(_stranger(func))


def _stranger(func: Any) -> str:
    return (
        f"{func} got the gradient of a weight that is kept as codes with a scale (MS-AMP) and would change another"
        " tensor by it, as optimizers do that take codes for weights. Use `torch.optim.AdamW` under"
        " `precision='msamp-o2'` (or o1, o3), or `lightning_lowprec.msamp.adamw.ScaledAdamW`."
    )
