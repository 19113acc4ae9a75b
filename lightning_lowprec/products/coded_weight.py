"""Tensors that appear to have values, and hold codes with a scale: what every such class does alike.

    read    F.linear(x, weight), weight.pow(2)      values, computed for this operation
    view    weight.t(), weight.detach()             codes of the same memory, for operations that the class knows
    write   weight.copy_(x), weight.mul_(2)         refused, or encoded anew: the class says
    copy    deepcopy, ``module.to(device)``         codes, with the attributes that a user gave the weight

A layer of the class's own backend takes the codes. The classes: torchao's gathered weights, a weight of MS-AMP. (A
shard that FSDP2 will gather as float8 is none of them: it holds values in high precision, and codes are made of them.)
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from lightning_lowprec.private import torch as private

_INNER = ("codes", "inv_scale", "msamp_state", "_is_param")
"""What torch and these classes keep in the ``__dict__`` of a weight, beside the user's attributes."""


class CodedWeight(Tensor):
    """Base of the classes; torchao's has torchao's tensor as its second base."""

    @abstractmethod
    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the codes, in the layout of the weight, and their scale, [] float32."""

    @abstractmethod
    def decode(self) -> Tensor:
        """Return the values, in the dtype that the weight shows."""

    @classmethod
    @abstractmethod
    def on_codes(cls, func: object, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that runs on codes; NotImplemented: it reads the values."""

    @classmethod
    def write(cls, func: object, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Any]) -> Any:
        """Run an operation that writes to the weights ``targets``, or raise RuntimeError, as gathered weights do.

        No TypeError: on a TypeError, torch's ``+=`` would compute a new tensor instead.
        """
        raise RuntimeError(
            f"{func} would write to a gathered weight of shape {tuple(targets[0].shape)} (FSDP2), which is freed after"
            " its layer ran. Write to the shards, between steps."
        )

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes `func` first
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Write, or run on codes, or let the operation read the values."""
        kwargs = kwargs or {}
        written = private.tree_leaves(private.written_arguments(func, args, kwargs))
        if targets := [target for target in written if isinstance(target, CodedWeight)]:
            return cls.write(func, args, kwargs, targets)
        result = cls.on_codes(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
        values = private.tree_map_only(CodedWeight, lambda weight: weight.decode(), (args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def showing(cls, codes: Tensor, dtype: object) -> Self:
        """Return a tensor of ``dtype`` without memory, strided like ``codes``."""
        like_codes = {"strides": codes.stride(), "storage_offset": codes.storage_offset(), "device": codes.device}
        with private.inference_mode_of(codes):
            weight: Self = private.make_wrapper_subclass(cls, codes.shape, dtype=dtype, **like_codes)
        return weight


def user_attributes(weight: object) -> dict[str, object]:
    """Return the attributes that a user gave a tensor."""
    return {name: value for name, value in vars(weight).items() if name not in _INNER}


def in_place_of(weight: Any, new: Any) -> Any:
    """Return ``new`` as a Parameter if ``weight`` is one, with the user's attributes and flags of ``weight``."""
    new = nn.Parameter(new, weight.requires_grad) if isinstance(weight, nn.Parameter) else new
    vars(new).update(user_attributes(weight))
    return new.requires_grad_(weight.requires_grad)
