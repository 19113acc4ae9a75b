"""Make a norm and the linear layers behind it compute as one call, while every module stays at its place.

A fused norm does not normalise: it returns its input as a :class:`DeferredNormOutput`. The attention or MLP between,
whose code is not ours and is not changed, passes that on to its linear layers. The first linear layer that runs
computes the fused call; each layer takes its part of the result.

    x -> FusedNorm -> DeferredNormOutput(x) -> attention -> FusedReader q: fused call of norm, q, k and v; part q
                                                         -> FusedReader k: part k
                                                         -> FusedReader v: part v

A DeferredNormOutput has a shape and no values: code that would do anything else with the normalised tensor raises, and
does not compute with wrong values.

The class of a module is changed in place (:mod:`~lightning_lowprec.conversion.roles`). The norm holds the unit that
computes, and the unit holds its linear layers: no module refers to itself in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.roles import RoleModule, take_role

if TYPE_CHECKING:
    from lightning_lowprec.te.fusion.units import NormUnit

UNIT = "_fusion_unit"
"""The key of the unit in the ``__dict__`` of a fused module. The unit is no submodule, so it is in no state dict."""


@final
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
    size = property(lambda self: self._x.size)

    def __getattr__(self, name: str) -> Any:
        """Refuse any other attribute of a Tensor."""
        raise AttributeError(_no_values(f"`.{name}`"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse any function of torch."""
        raise TypeError(_no_values(f"`{getattr(function, '__name__', function)}`"))

    def output_of(self, module: nn.Module) -> Tensor:
        """Return the output of a module that reads the norm: [*, K] -> [*, N] of a Linear, [*, K] of an MLP."""
        if module not in self._unit.readers:
            raise RuntimeError(
                f"A fused linear layer was given the output of another norm than the one it is fused with. {UNFUSE}"
            )
        outputs = self._outputs or self._unit(self._norm, self._x)
        if len(outputs) > 1:  # a single reader may run again, in a checkpoint
            self._outputs = outputs
        return outputs[self._unit.readers.index(module)]


UNFUSE = "Leave it out with `keep=[...]`, or undo the fusion with `unfuse(model)`."


def _no_values(asked: str) -> str:
    return f"The output of a fused norm has no values of its own, and {asked} was asked of it. {UNFUSE}"


class FusedModule(PlainFirst, RoleModule):
    """A module that computes as a part of one call; its class was changed in place."""

    def extra_repr(self) -> str:
        """Add the word "fused"."""
        return ", ".join(filter(None, (super().extra_repr(), "fused")))


@final
class FusedNorm(FusedModule):
    """A norm that is computed by the layers behind it."""

    def forward(self, x: Tensor) -> Any:
        """[*, K] -> a DeferredNormOutput of this shape; the norm's own output if there are no tokens."""
        return DeferredNormOutput(self, x) if x.numel() else super().forward(x)


@final
class FusedReader(FusedModule):
    """A Linear or an MLP that computes together with the norm in front of it; an MLP's own layers are not called."""

    def forward(self, input: Any) -> Tensor:
        """A DeferredNormOutput [*, K] -> [*, N]."""
        if isinstance(input, DeferredNormOutput):
            return input.output_of(self)
        if input.numel():
            raise RuntimeError(
                f"A fused {type(self).__name__} was called without the norm that it is fused with; outside of its"
                f" model it computes nothing. {UNFUSE}"
            )
        output: Tensor = super().forward(input)
        return output


def fuse_module(module: nn.Module, role: type[FusedModule], unit: Any = None) -> None:
    """Change the class of a module in place; the module that holds the unit gets it."""
    take_role(module, role, {} if unit is None else {UNIT: unit})
