"""SGD with momentum for weights of 8 and 16 bits with scales: MS-AMP's levels O1, O2 and O3.

    scale_weight_(linear.weight, "O2")      # from here on the weight is float16 codes: read it with values_of(weight)
    optimizer = ScaledSGD(model.parameters(), lr=0.1, momentum=0.9, level="O2")

The momentum buffer has 16 bits, AdamW's first moment only 8. The reason: no second moment normalises the buffer, so the
buffer itself moves the weight. And float8_e4m3fn cannot decay slowly: with 3 bits behind the point, ``0.95 * x`` rounds
back to ``x`` (1.125 -> 1.069 -> 1.125). From momentum 0.945 on, such a buffer would push the weight for ever after its
gradients are gone; a float16 buffer does so from 0.9995 on.

Bytes per parameter of codes between steps, with a ScaledGradient (1 byte): O1 7, O2 5, O3 6; without momentum
3, 3 and 4; SGD with momentum in float32: 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim.sgd import sgd
from typing_extensions import Unpack, override

from lightning_lowprec.conversion.options import shows, take
from lightning_lowprec.msamp.flat_step import Flats, Rule
from lightning_lowprec.msamp.optimizer import ScaledChoices, ScaledOptimizer, ScaledOptions, check_at_least_zero
from lightning_lowprec.numerics.formats import FP16, Format

_BUFFER: Final = "momentum_buffer"
_MOMENTS: Final[dict[str, Format]] = {_BUFFER: FP16}


@shows(ScaledOptions)
class ScaledSGD(ScaledOptimizer):
    """SGD for parameters of codes (see :func:`~lightning_lowprec.msamp.weight.scale_weight_`) and plain parameters.

    Plain parameters get torch's SGD, bit for bit; in half precision with a float32 buffer and a float32 update.
    The gradient of a parameter of codes is a ScaledGradient or a float32 tensor.
    At level O2 and O3 the buffer is float16 codes.

    Args:
        params: parameters or groups, as in any torch optimizer.
        lr: learning rate.
        momentum: decay of the buffer; 0: no buffer.
        dampening: how much of the gradient does not enter the buffer, except for the first gradient.
        weight_decay: added to the gradient, as in torch's SGD.
        nesterov: look ahead; needs momentum and no dampening.

    Raises:
        ValueError: an argument out of range, or a parameter scaled for another level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[ScaledChoices],
    ) -> None:
        check_at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (not momentum or dampening):
            raise ValueError(
                f"`nesterov=True` is not valid with momentum={momentum!r}, dampening={dampening!r}; expected a momentum"
                " above 0 and no dampening."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, take(ScaledOptions, options))

    @override
    def _moments(self, group: Mapping[str, Any]) -> Mapping[str, Format]:
        return _MOMENTS if group["momentum"] else {}

    @override
    def _rule(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Rule:
        numbers = {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "fresh": 1 - group["dampening"] if _BUFFER in state else 1.0,
            "weight_decay": group["weight_decay"],
            "nesterov": bool(group["nesterov"]),
            "decays": bool(group["weight_decay"]),
        }
        return Rule(function=sgd_, numbers=numbers)

    @override
    def _update_plain(
        self, group: dict[str, Any], params: list[Tensor], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        buffers = [self.state[p].get(_BUFFER) if p in self.state else None for p in params]
        sgd(
            weights,
            grads,
            buffers,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if group["momentum"]:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p][_BUFFER] = buffer


def sgd_(flat: Flats, numbers: Mapping[str, Any]) -> None:
    """Apply SGD with momentum, as torch defines it, in place to flat (N,) float32 tensors.

    Args:
        flat: "grad" (overwritten), "weight" and, with momentum, "momentum_buffer".
        numbers: "lr", "momentum", "weight_decay", "fresh" (how much of the gradient enters the buffer); bools: "decays"
            (there is weight decay) and "nesterov".
    """
    grad, weight = flat["grad"], flat["weight"]
    if numbers["decays"]:
        grad.add_(weight * numbers["weight_decay"])
    if _BUFFER in flat:
        buffer = flat[_BUFFER]
        buffer.mul_(numbers["momentum"]).add_(grad * numbers["fresh"])
        grad = grad.add_(buffer * numbers["momentum"]) if numbers["nesterov"] else buffer
    weight.sub_(grad * numbers["lr"])
