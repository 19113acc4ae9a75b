"""A weight that is e4m3 codes and one scale: the GEMM takes the codes, anything else sees the values.

    weight = codes * inv_scale

Nothing updates such a weight. It was gathered from shards that are updated, or it is frozen and kept in FP8 alone.
(MS-AMP's codes, which are updated, have a master beside them: ``msamp.fsdp2.MsampShard``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self, final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast
from lightning_lowprec.private.torch import written_arguments

_aten: Any = torch.ops.aten
_ALIASES: Final = {_aten.detach.default, _aten.as_strided.default, _aten.view.default}  # of the whole shape
_OWN: Final = ("codes", "inv_scale", "_is_param")  # in the __dict__ of a Parameter that is a Fp8Weight


class Fp8Weight(Tensor):
    """Codes and their scale, looking like a tensor of ``dtype``.

    Args:
        codes: (...) float8_e4m3fn.
        inv_scale: (1,) float32.
        dtype: what it looks like, and gets gradients in.
    """

    codes: Tensor
    inv_scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Self:
        """A tensor without memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        made: Self = make(cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device)
        made.codes, made.inv_scale = codes, inv_scale
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Aliases, and what is moved, stay codes; everything else reads the values; what would write is asked."""
        kwargs = kwargs or {}
        if func in _ALIASES:
            return args[0].alike(func(args[0].codes, *args[1:], **kwargs), args[0].inv_scale, args[0].dtype)
        if func is _aten._to_copy.default:
            dtype = kwargs.pop("dtype", None) or args[0].dtype
            return args[0].alike(func(args[0].codes, **kwargs), func(args[0].inv_scale, **kwargs), dtype)
        for target in pytree.tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(target, Fp8Weight):
                return target.write(func, *args[1:])
        return func(*pytree.tree_map_only(Fp8Weight, lambda w: w.values().to(w.dtype), args), **kwargs)

    def alike(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Self:
        """Of the same class; with what users have hung at it, which ``module.to`` would lose when it swaps."""
        made = type(self)(codes, inv_scale, dtype)
        _carry(self, made)
        return made

    def write(self, func: Any, *args: Any) -> Any:
        """An operation would change the weight; not a TypeError, of which torch's ``+=`` makes another sum."""
        raise RuntimeError(f"{func} would write to a gathered weight; write to its shards, when nothing is gathered.")

    def _set_data(self, tensor: Tensor) -> None:
        self.write(_aten.copy_.default, tensor)

    # torch's setter would change the size and the dtype that it shows, and leave the codes
    data = property(lambda self: self.detach(), _set_data)

    def __deepcopy__(self, memo: Any) -> Self:
        """Codes too; ``clone()`` gives the values, to be written to."""
        made: Any = self.alike(self.codes.clone(), self.inv_scale.clone(), self.dtype)
        memo[id(self)] = (
            nn.Parameter(made, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else made
        )
        copied: Self = memo[id(self)]
        return copied

    def values(self) -> Tensor:
        """(...) float32, exact."""
        return self.codes.float() * self.inv_scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What compilers trace through, and ``module.to`` swaps."""
        return ["codes", "inv_scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Self:
        """The inverse."""
        return cls(inner["codes"], inner["inv_scale"], dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape and the scale."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, inv_scale={self.inv_scale.item():.3e})"


@final
class FrozenWeight(Fp8Weight):
    """A weight that does not train, in FP8 alone: one byte per element.

    Its scale is a power of two, so float32 and bf16 hold its values exactly, and give the same codes again: it passes
    through checkpoints and other ranks unchanged. It can be given other values, but not updated in steps, which e4m3
    would swallow.
    """

    @torch.no_grad()
    def write(self, func: Any, *args: Any) -> Any:
        """Take other values: (...) any float."""
        if func is not _aten.copy_.default:
            raise RuntimeError(
                f"{func} would update a weight that is frozen and kept in FP8 alone (`fp8_params=True`). Let it train"
                " before the model is set up, or set it up without `fp8_params`; new values are taken by `weight.data ="
                " values`, a state dict, or PEFT's merge with `safe_merge=True`."
            )
        codes, inv_scale = _encode(args[0])
        self.codes.copy_(codes)
        self.inv_scale.copy_(inv_scale)
        return self


def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """(...) any float -> codes, and (1,) float32."""
    if isinstance(values, Fp8Weight):
        values = values.values()
    scale = power_of_two_scale(amax(values), E4M3)
    return saturating_cast(values.float() * scale, E4M3), scale.reciprocal().reshape(1)


@torch.no_grad()
def store_in_fp8(layer: Any, device: torch.device) -> None:
    """Keep the layer's weight, which does not train, in FP8 alone; the Parameter stays the same object.

    Args:
        layer: changed in place.
        device: where the weight will be used; it is quantised there, and goes there now.
    """
    weight = layer.weight
    _swap(weight, FrozenWeight(*_encode(weight.detach().to(device)), weight.dtype))


@torch.no_grad()
def store_in_full(layer: Any) -> None:
    """Give a weight that is in FP8 alone its values in full, in the dtype that it has shown; any other stays."""
    weight = layer.weight
    if isinstance(weight, FrozenWeight):
        _swap(weight, weight.values().to(weight.dtype))


def _swap(param: Any, tensor: Tensor) -> None:
    """The same Parameter, with what users have hung at it, gets other data."""
    made = nn.Parameter(tensor, requires_grad=param.requires_grad)
    _carry(param, made)
    torch.utils.swap_tensors(param, made)  # type: ignore[no-untyped-call]


def _carry(old: Any, new: Any) -> None:
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in _OWN})
