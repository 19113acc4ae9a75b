"""The logits that a head has not computed yet; a loss that knows them never asks for all of them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

_OPERATORS: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "getitem", "setitem"),
)
NOT_USED: Final = (
    "`head={!r}` has no effect on this forward: its logits were read before a loss was computed from labels, so all of"
    " them were computed. Pass `labels=...` to the model, or compute the loss by"
    " `lightning_lowprec.losses.linear_cross_entropy`."
)


@final
class LazyLogits:
    """What a head returns in training in place of logits: whatever reads them gets the tensor, computed then.

    The tensor is the one that the Linear would have returned, with its graph. It can be read until the backward pass
    under FSDP2, which frees the weight then, and at any time elsewhere.

    Args:
        head: the layer; called with ``task="logits"`` it computes logits.
        hidden: (..., K), the input of the layer.
        option: the option of the plugin, for a warning.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, option: str) -> None:
        self.head = head
        self.hidden = hidden
        self.option = option
        self.has_loss = False
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._cast_to: torch.dtype | None = None
        self._computed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self.hidden.shape[:-1], int(self.head.out_features)))  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._cast_to or self._autocast or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits that will be cast when they are computed, for a dtype; else what the tensor returns."""
        if self._computed is not None or kwargs or len(args) != 1 or not isinstance(args[0], torch.dtype):
            return self.tensor().to(*args, **kwargs)
        cast = LazyLogits.__new__(LazyLogits)
        vars(cast).update(vars(self), _cast_to=args[0])
        return cast

    def contiguous(self) -> LazyLogits:
        """Return the logits, which will be contiguous."""
        return self

    def tensor(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self._computed is None:
            if not self.has_loss and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                warnings.warn(NOT_USED.format(self.option), stacklevel=3)
            enabled = self._autocast is not None
            with torch.autocast(self.device.type, dtype=self._autocast, enabled=enabled):
                logits: Tensor = self.head(self.hidden, task="logits")
            self._computed = logits if self._cast_to is None else logits.to(self._cast_to)
        return self._computed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with the tensor."""
        return func(*map(_computed, args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method of the tensor."""
        if name.startswith("__") or "hidden" not in vars(self):  # copying and pickling ask an empty object
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]

    def __hash__(self) -> int:
        """Return the identity, as for a tensor."""
        return id(self)

    def __reduce__(self) -> Any:
        """Copy and pickle the logits as a tensor."""
        return _same, (self.tensor().detach(),)

    def __repr__(self) -> str:
        """Show the shape; nothing is computed."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _computed(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value))
    return value


def _of_tensors(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(*operands: Any) -> Any:
        values = [_computed(operand) for operand in operands]
        return function(*(reversed(values) if swapped else values))

    return method


for _name in _OPERATORS:
    _plain = _name.strip("_")
    setattr(LazyLogits, f"__{_plain}__", _of_tensors(getattr(operator, _name)))
    if _name in _OPERATORS[:11]:
        setattr(LazyLogits, f"__r{_plain}__", _of_tensors(getattr(operator, _name), swapped=True))
