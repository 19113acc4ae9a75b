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

from collections.abc import Mapping
from typing import Any, Final, final

from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd
from typing_extensions import override

from lightning_lowprec.msamp.flat_step import Flats
from lightning_lowprec.msamp.optimizer import ScaledOptimizer
from lightning_lowprec.numerics.formats import FP16, Format

_BUFFER: Final = "momentum_buffer"
_MOMENTS: Final[dict[str, Format]] = {_BUFFER: FP16}


@final
class ScaledSGD(ScaledOptimizer, SGD):
    """torch's SGD, also for parameters of codes (see :func:`~lightning_lowprec.msamp.weight.scale_weight_`).

    Plain parameters get torch's SGD, bit for bit; in half precision with a float32 buffer and a float32 update.
    The gradient of a parameter of codes is a ScaledGradient or a float32 tensor.
    At level O2 and O3 the buffer is float16 codes.
    """

    @override
    def _moments(self, group: Mapping[str, Any]) -> Mapping[str, Format]:
        return _MOMENTS if group["momentum"] else {}

    @override
    def _numbers(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, float | bool]:
        return {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "fresh": 1 - group["dampening"] if _BUFFER in state else 1.0,
            "weight_decay": group["weight_decay"],
            "nesterov": bool(group["nesterov"]),
            "decays": bool(group["weight_decay"]),
        }

    @staticmethod
    @override
    def _update_flat(flat: Flats, numbers: Mapping[str, Any]) -> None:
        """Apply SGD with momentum, as torch defines it."""
        grad, weight = flat["grad"], flat["weight"]
        if numbers["decays"]:
            grad.add_(weight * numbers["weight_decay"])
        if _BUFFER in flat:
            buffer = flat[_BUFFER]
            buffer.mul_(numbers["momentum"]).add_(grad * numbers["fresh"])
            grad = grad.add_(buffer * numbers["momentum"]) if numbers["nesterov"] else buffer
        weight.sub_(grad * numbers["lr"])

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
