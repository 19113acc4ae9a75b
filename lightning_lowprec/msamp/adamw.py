"""AdamW whose weights, gradients and moments are 8 and 16 bits wide with scales: MS-AMP's O1, O2 and O3.

    scale_weight_(linear.weight, "O2")      # from here on the weight is float16 codes: read it with values_of(weight)
    optimizer = ScaledAdamW(model.parameters(), level="O2")

A step decodes to float32, updates, and encodes with a fresh amax per tensor (arXiv 2310.18313, sec. 2.2). Bytes per
parameter of codes between steps, with a ScaledGradient (1 byte): O1 11, O2 6, O3 7; AdamW in float32: 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from typing_extensions import Unpack, override

from lightning_lowprec.conversion.options import shows, take
from lightning_lowprec.msamp.flat_step import Flats, Rule
from lightning_lowprec.msamp.optimizer import ScaledChoices, ScaledOptimizer, ScaledOptions, check_at_least_zero
from lightning_lowprec.numerics.formats import E4M3, FP16, Format

_MOMENTS: Final[dict[str, Format]] = {"exp_avg": E4M3, "exp_avg_sq": FP16}


@shows(ScaledOptions)
class ScaledAdamW(ScaledOptimizer):
    """AdamW for parameters of codes (see :func:`~lightning_lowprec.msamp.weight.scale_weight_`) and plain parameters.

    Plain parameters get torch's AdamW, bit for bit; in half precision with float32 moments and a float32 update.
    The gradient of a parameter of codes is a ScaledGradient or a float32 tensor.
    At level O2 and O3 the first moment is float8_e4m3fn codes, the second float16 codes.

    Args:
        params: parameters or groups, as in any torch optimizer.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.

    Raises:
        ValueError: an argument out of range, or a parameter scaled for another level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[ScaledChoices],
    ) -> None:
        check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"`betas={betas!r}` is not valid; expected two numbers in [0, 1).")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, take(ScaledOptions, options)
        )

    @override
    def _moments(self, group: Mapping[str, Any]) -> Mapping[str, Format]:
        return _MOMENTS

    @override
    def _rule(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        step, lr = state.get("step", 0) + 1, float(group["lr"])
        numbers = {
            "lr": lr,
            "decay": 1 - lr * group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "fresh1": 1 - beta1,
            "fresh2": 1 - beta2,
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step,
            "eps": group["eps"],
        }
        return Rule(function=adamw_, numbers=numbers)

    @override
    def _update_plain(
        self, group: dict[str, Any], params: list[Tensor], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        states = [self._state_of(p, _MOMENTS) for p in params]
        for state in states:  # torch's function needs a tensor
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        adamw(
            weights,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def adamw_(flat: Flats, numbers: Mapping[str, Any]) -> None:
    """Apply decoupled decay, then AdamW (arXiv 1711.05101, algorithm 2), in place to flat (N,) float32 tensors.

    Args:
        flat: "grad" (overwritten), "exp_avg", "exp_avg_sq", "weight".
        numbers: "lr", "eps", "decay" (``1 - lr * weight_decay``), and for both moments "beta", "fresh" (``1 - beta``),
            "correction" (``1 - beta**step``).
    """
    grad, exp_avg, exp_avg_sq, weight = (flat[name] for name in ("grad", *_MOMENTS, "weight"))
    weight.mul_(numbers["decay"])
    exp_avg.mul_(numbers["beta1"]).add_(grad * numbers["fresh1"])
    exp_avg_sq.mul_(numbers["beta2"]).add_(grad.mul_(grad).mul_(numbers["fresh2"]))
    denominator = torch.div(exp_avg_sq, numbers["correction2"], out=grad).sqrt_().add_(numbers["eps"])
    weight.sub_((exp_avg / numbers["correction1"]).div_(denominator).mul_(numbers["lr"]))
