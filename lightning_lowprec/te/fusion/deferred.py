"""How a norm and the linear layers behind it become one call while every module stays where it is.

A fused norm does not normalise: it hands on its input as a :class:`Deferred`. The attention or MLP between, whose code
is not ours and is not touched, passes that on to its linear layers, and these take their share of one fused result,
computed when the first asks. A Deferred has a shape and no values: code that would do anything else with the normalised
tensor fails instead of computing with the wrong one.

Modules change their class in place, to a subclass of what they were. What was a child stays a child; every Parameter
keeps its owner, so state dicts, optimizers, ties and sharding do not know about fusion. The norm holds the unit that
computes, and the unit its linear layers: no module refers to itself in a circle.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

UNIT = "_fusion_unit"
"""Where in its ``__dict__`` a fused module holds the unit; not a submodule, so it is in no state dict."""


class Unit(Protocol):
    """What computes a norm and its linear layers."""

    linears: tuple[nn.Linear, ...]

    def linear_outputs(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """[*, K] -> [*, N] for each of ``linears``."""

    def mlp_output(self, norm: nn.Module, x: Tensor) -> Tensor:
        """[*, K] -> [*, K]."""


class Deferred:
    """The output of a norm that is not computed on its own: shape, dtype and device of the norm's input, no values."""

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        self._norm = norm
        self._x = x
        self._unit: Unit = norm.__dict__[UNIT]
        self._outputs: tuple[Tensor, ...] | None = None

    shape = property(lambda self: self._x.shape)
    dtype = property(lambda self: self._x.dtype)
    device = property(lambda self: self._x.device)

    def size(self, *dim: int) -> Any:
        """As of a Tensor."""
        return self._x.size(*dim)

    def __getattr__(self, name: str) -> Any:
        """Anything else that a Tensor has."""
        raise AttributeError(_no_values(f"`.{name}`"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch."""
        raise TypeError(_no_values(f"`{getattr(function, '__name__', function)}`"))

    def through(self, linear: nn.Module) -> Tensor:
        """The output of one of the linear layers: [*, K] -> [*, N]."""
        place = next((i for i, one in enumerate(self._unit.linears) if one is linear), None)
        if place is None:
            raise RuntimeError(f"{_ANOTHER} {UNFUSE}")
        if self._outputs is None:
            self._outputs = self._unit.linear_outputs(self._norm, self._x)
        return self._outputs[place]

    def through_mlp(self) -> Tensor:
        """[*, K] -> [*, K]."""
        return self._unit.mlp_output(self._norm, self._x)


def _no_values(asked: str) -> str:
    return f"The output of a fused norm has no values of its own, and {asked} was asked of it. {UNFUSE}"


UNFUSE = "Leave it out with `keep=[...]`, or undo the fusion with `unfuse(model)`."
_ANOTHER = "A fused linear layer was given the output of another norm than the one it is fused with."


def _alone(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"A fused {type(module).__name__} was called without the norm that it is fused with; outside of its model it"
        f" computes nothing. {UNFUSE}"
    )


class InPlace(nn.Module):
    """A module whose class was changed in place."""

    was: ClassVar[type[nn.Module]]
    """Its class before."""
    role: ClassVar[type[InPlace]]

    def extra_repr(self) -> str:
        """That of the class, and that it is fused."""
        return ", ".join(filter(None, (super().extra_repr(), "fused")))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For deepcopy and pickle, which could not find a class that was made at run time."""
        return _new, (self.role, self.was), self.__dict__


class FusedNorm(InPlace):
    """A norm that leaves its work to the linear layers behind it."""

    def forward(self, x: Tensor) -> Any:
        """A tensor [*, K] -> a Deferred of this shape; without tokens, what the norm itself returns."""
        return Deferred(self, x) if x.numel() else super().forward(x)


class FusedLinear(InPlace):
    """A Linear that computes together with the norm in front of it."""

    def forward(self, input: Any) -> Tensor:
        """A Deferred [*, K] -> [*, N]."""
        if isinstance(input, Deferred):
            return input.through(self)
        if input.numel():
            raise _alone(self)
        return F.linear(input, self.weight, self.bias)  # type: ignore[arg-type]


class FusedMLP(InPlace):
    """An MLP that computes together with the norm in front of it; its own layers are not called."""

    def forward(self, input: Any) -> Tensor:
        """A Deferred [*, K] -> [*, K]."""
        if isinstance(input, Deferred):
            return input.through_mlp()
        if input.numel():
            raise _alone(self)
        output: Tensor = super().forward(input)
        return output


_CLASSES: dict[tuple[Any, Any], Any] = {}


def _fused_class(role: Any, was: Any) -> Any:
    """A class of the same name: code that asks for it (``"RMSNorm" in type(m).__name__``) gets the same answer."""
    if (role, was) not in _CLASSES:
        body = {"was": was, "role": role, "__module__": was.__module__}
        _CLASSES[role, was] = type(was.__name__, (role, was), body)
    return _CLASSES[role, was]


def _new(role: type[InPlace], was: type[nn.Module]) -> Any:
    cls = _fused_class(role, was)
    return cls.__new__(cls)


def become(module: nn.Module, role: type[InPlace], unit: Any = None) -> None:
    """Give a module its role, and what computes if it is the one that holds it."""
    module.__class__ = _fused_class(role, type(module))
    if unit is not None:
        module.__dict__[UNIT] = unit


def revert(module: nn.Module) -> None:
    """Make a module what it was, if it has a role."""
    if isinstance(module, InPlace):
        module.__class__ = module.was  # type: ignore[assignment]
        module.__dict__.pop(UNIT, None)


def is_fused(module: nn.Module) -> bool:
    """Whether a module has a role in a fusion."""
    return isinstance(module, InPlace)
