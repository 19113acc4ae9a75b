"""Make a norm and the linear layers behind it compute as one call, while every module stays at its place.

A fused norm does not normalise: it returns its input as a :class:`DeferredNormOutput`. The attention or MLP between,
whose code is not ours and is not changed, passes that on to its linear layers. The first linear layer that runs
computes the fused call; each layer takes its part of the result.

    x -> FusedNorm -> DeferredNormOutput(x) -> attention -> FusedLinear q: fused call of norm, q, k and v; part q
                                                         -> FusedLinear k: part k
                                                         -> FusedLinear v: part v

A DeferredNormOutput has a shape and no values: code that would do anything else with the normalised tensor raises, and
does not compute with wrong values.

The class of a module is changed in place, to a subclass of its class. Children stay children and every Parameter keeps
its owner, so state dicts, optimizers, ties and sharding stay the same. The norm holds the unit that computes, and the
unit holds its linear layers: no module refers to itself in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_lowprec.te.fusion.units import NormUnit

UNIT = "_fusion_unit"
"""The key of the unit in the ``__dict__`` of a fused module. The unit is no submodule, so it is in no state dict."""


class DeferredNormOutput:
    """The output of a norm that has not been computed: shape, dtype and device of the norm's input, no values."""

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        self._norm = norm
        self._x = x
        self._unit: NormUnit = norm.__dict__[UNIT]
        self._outputs: tuple[Tensor, ...] | None = None

    shape = property(lambda self: self._x.shape)
    dtype = property(lambda self: self._x.dtype)
    device = property(lambda self: self._x.device)

    def size(self, *dim: int) -> Any:
        """Return the size of the norm's input, as ``Tensor.size`` does."""
        return self._x.size(*dim)

    def __getattr__(self, name: str) -> Any:
        """Refuse any other attribute of a Tensor."""
        raise AttributeError(_no_values(f"`.{name}`"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse any function of torch."""
        raise TypeError(_no_values(f"`{getattr(function, '__name__', function)}`"))

    def linear_output(self, linear: nn.Module) -> Tensor:
        """Return the output of one of the linear layers: [*, K] -> [*, N]."""
        place = next((i for i, fused in enumerate(self._unit.linears) if fused is linear), None)
        if place is None:
            raise RuntimeError(
                f"A fused linear layer was given the output of another norm than the one it is fused with. {UNFUSE}"
            )
        if self._outputs is None:
            self._outputs = self._unit.linear_outputs(self._norm, self._x)
        return self._outputs[place]

    def mlp_output(self) -> Tensor:
        """Return the output of the whole MLP: [*, K] -> [*, K]."""
        output: Tensor = self._unit.mlp_output(self._norm, self._x)
        return output


UNFUSE = "Leave it out with `keep=[...]`, or undo the fusion with `unfuse(model)`."


def _no_values(asked: str) -> str:
    return f"The output of a fused norm has no values of its own, and {asked} was asked of it. {UNFUSE}"


def _called_alone(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"A fused {type(module).__name__} was called without the norm that it is fused with; outside of its model it"
        f" computes nothing. {UNFUSE}"
    )


class FusedModule(nn.Module):
    """A module whose class was changed in place, to a class that derives from ``role`` and ``unfused_class``."""

    unfused_class: ClassVar[type[nn.Module]]
    """The class that the module had."""
    role: ClassVar[type[FusedModule]]

    def extra_repr(self) -> str:
        """Add the word "fused"."""
        return ", ".join(filter(None, (super().extra_repr(), "fused")))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support deepcopy and pickle, which cannot import a class that was made at run time."""
        return _new, (self.role, self.unfused_class), self.__dict__


class FusedNorm(FusedModule):
    """A norm that is computed by the linear layers behind it."""

    def forward(self, x: Tensor) -> Any:
        """[*, K] -> a DeferredNormOutput of this shape; the norm's own output if there are no tokens."""
        return DeferredNormOutput(self, x) if x.numel() else super().forward(x)


class FusedLinear(FusedModule):
    """A Linear that computes together with the norm in front of it."""

    def forward(self, input: Any) -> Tensor:
        """A DeferredNormOutput [*, K] -> [*, N]."""
        if isinstance(input, DeferredNormOutput):
            return input.linear_output(self)
        if input.numel():
            raise _called_alone(self)
        return F.linear(input, self.weight, self.bias)  # type: ignore[arg-type]


class FusedMLP(FusedModule):
    """An MLP that computes together with the norm in front of it; the MLP's own layers are not called."""

    def forward(self, input: Any) -> Tensor:
        """A DeferredNormOutput [*, K] -> [*, K]."""
        if isinstance(input, DeferredNormOutput):
            return input.mlp_output()
        if input.numel():
            raise _called_alone(self)
        output: Tensor = super().forward(input)
        return output


_CLASSES: dict[tuple[Any, Any], Any] = {}


def _fused_class(role: Any, unfused_class: Any) -> Any:
    """Return a class with the name of ``unfused_class``: code may ask ``"RMSNorm" in type(module).__name__``."""
    if (role, unfused_class) not in _CLASSES:
        body = {"unfused_class": unfused_class, "role": role, "__module__": __name__}
        _CLASSES[role, unfused_class] = type(unfused_class.__name__, (role, unfused_class), body)
    return _CLASSES[role, unfused_class]


def _new(role: type[FusedModule], unfused_class: type[nn.Module]) -> Any:
    cls = _fused_class(role, unfused_class)
    return cls.__new__(cls)


def fuse_module(module: nn.Module, role: type[FusedModule], unit: Any = None) -> None:
    """Change the class of a module in place; the module that holds the unit gets it."""
    module.__class__ = _fused_class(role, type(module))
    if unit is not None:
        module.__dict__[UNIT] = unit


def unfuse_module(module: nn.Module) -> None:
    """Give a fused module its own class back, in place; leave any other module alone."""
    if isinstance(module, FusedModule):
        module.__class__ = module.unfused_class  # type: ignore[assignment]
        module.__dict__.pop(UNIT, None)
