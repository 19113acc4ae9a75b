"""AdamW whose weights, gradients and moments are 8 and 16 bits wide with scales: MS-AMP's O1, O2 and O3.

    scale_weight_(linear.weight, "O2")      # from here on the weight is float16 codes: read it with values_of(weight)
    optimizer = ScaledAdamW(model.parameters(), level="O2")

An AdamW or Adam that holds such weights is converted in place by :func:`convert_optimizer_`: the object stays.

A step decodes to float32, updates, and encodes with a fresh amax per tensor (arXiv 2310.18313, sec. 2.2). State dicts
are those of the plain optimizer, in float32.
"""

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_lowprec.masters.moments import params_by_key
from lightning_lowprec.msamp.optimizer import OPTIONS, ScaledOptimizer, check_options
from lightning_lowprec.msamp.step import Flats
from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.msamp.weight_state import Level
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MSAMP
from lightning_lowprec.private.torch_optimizers import check_step, refuse_copies

_ADAMW_MOMENTS: Final[dict[str, Format]] = {"exp_avg": E4M3, "exp_avg_sq": FP16}
SUPPORTED: Final = "torch.optim.AdamW, torch.optim.Adam, lightning_lowprec.msamp.ScaledAdamW"


@final
class ScaledAdamW(ScaledOptimizer, AdamW):
    """torch's AdamW, also for parameters of codes (see :func:`~lightning_lowprec.msamp.weight.scale_weight_`).

    Plain parameters get torch's AdamW, bit for bit; in half precision with float32 moments and a float32 update. At
    level O2 and O3 the first moment is float8_e4m3fn codes, the second float16 codes. An Adam that was converted adds
    its weight decay to the gradient, as torch's Adam does.
    """

    @override
    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as in torch: an AdamW that loads the state of an Adam stays an AdamW
            group["decoupled_weight_decay"] |= self.defaults["decoupled_weight_decay"]

    @override
    def _moments(self) -> Mapping[str, Format]:
        return _ADAMW_MOMENTS

    @override
    def _numbers(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, float | bool]:
        beta1, beta2 = group["betas"]
        step, lr, decay = state.get("step", 0) + 1, float(group["lr"]), group["weight_decay"]
        coupled = bool(decay) and not group["decoupled_weight_decay"]
        return {
            "lr": lr,
            "coupled": coupled,
            "decay": decay if coupled else 1 - lr * decay,
            "beta1": beta1,
            "beta2": beta2,
            "fresh1": 1 - beta1,
            "fresh2": 1 - beta2,
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step,
            "eps": group["eps"],
        }

    @staticmethod
    @override
    def _update_flat(flat: Flats, numbers: Mapping[str, Any]) -> None:
        grad, exp_avg, exp_avg_sq, weight = (flat[name] for name in ("grad", *_ADAMW_MOMENTS, "weight"))
        if numbers["coupled"]:
            grad.add_(weight * numbers["decay"])
        else:
            weight.mul_(numbers["decay"])
        exp_avg.mul_(numbers["beta1"]).add_(grad * numbers["fresh1"])
        exp_avg_sq.mul_(numbers["beta2"]).add_(grad.mul_(grad).mul_(numbers["fresh2"]))
        denominator = torch.div(exp_avg_sq, numbers["correction2"], out=grad).sqrt_().add_(numbers["eps"])
        weight.sub_((exp_avg / numbers["correction1"]).div_(denominator).mul_(numbers["lr"]))


def convert_optimizer_(optimizer: Optimizer, level: Level, *, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Let ``optimizer`` step parameters of codes, in place; an optimizer without such parameters does not change.

    If all parameters of codes are frozen, optimizers that are not supported do not change either. A second call changes
    nothing. For the options see :class:`~lightning_lowprec.msamp.optimizer.ScaledOptimizer`.

    Raises:
        TypeError: another optimizer.
        ValueError: an option that is not possible with MS-AMP, or an optimizer of another level.
        RuntimeError: somebody replaced ``optimizer.step``.
    """
    refuse_copies(optimizer, "the weights of MS-AMP, which are codes")
    coded = [p for p in parameters_of(optimizer) if msamp_state_of(p) is not None]
    if not coded:
        return
    if isinstance(optimizer, ScaledOptimizer):
        if optimizer.level != level:
            if "plain_class" not in vars(optimizer):
                raise ValueError(
                    f"the optimizer has `level={optimizer.level!r}`; expected {level!r}, that of the weights."
                )
            saved = optimizer.state_dict()  # its weights were converted again
            optimizer.level = level
            optimizer.load_state_dict(saved)
        check_options(optimizer)
    elif type(optimizer) in (AdamW, Adam):
        check_options(optimizer)
        check_step(optimizer, MSAMP)
        scaled: Any = optimizer
        plain, before = type(scaled), scaled.state_dict() if scaled.state else None
        vars(scaled).pop("step", None)  # a scheduler's wrapper, which calls the old class; the new class needs none
        scaled.__class__ = ScaledAdamW
        options = {"level": level, "stochastic_rounding": stochastic_rounding, "seed": seed, "compile": "auto"}
        ScaledOptimizer.__setstate__(scaled, {**options, "plain_class": plain})  # gives the new class its step hooks
        if before is not None:
            scaled.load_state_dict(before)
    elif any(p.requires_grad for p in coded):
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot step weights that are kept as codes with a scale (MS-AMP"
            f" {level}); expected one of: {SUPPORTED}."
        )


def revert_optimizer(optimizer: Optimizer) -> None:
    """Make an optimizer plain that :func:`convert_optimizer_` has converted, in place; its state becomes float32.

    Call after the weights have become plain; an optimizer of weights of codes does not change.
    """
    coded = any(msamp_state_of(p) is not None for p in parameters_of(optimizer))
    if coded or not isinstance(optimizer, ScaledOptimizer):
        return
    saved: Any = optimizer.state_dict()
    if "plain_class" not in vars(optimizer):
        optimizer.load_state_dict(saved)
        return
    optimizer.__class__ = vars(optimizer).pop("plain_class")
    for name in OPTIONS:
        vars(optimizer).pop(name)
    for key, p in params_by_key(optimizer, saved).items():
        if key in saved["state"]:  # torch's own loading would cast to the weights' dtype
            optimizer.state[p] = saved["state"][key]
