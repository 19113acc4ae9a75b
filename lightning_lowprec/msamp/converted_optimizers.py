"""Converting an AdamW, Adam or SGD that holds parameters of codes, in place: the optimizer object stays.

    optimizer = torch.optim.AdamW(model.parameters())
    scale_linears(model, ["fc"], "O2")
    convert_optimizer_(optimizer, "O2")      # with or without a scheduler, before or after its first step

Groups, learning rate, state and schedulers stay. The optimizer becomes a ScaledAdamW or a ScaledSGD, whose state dicts
are those of the plain optimizer, in float32. At level O3 they also have the ``master_param`` (float32) of every weight
that was stepped; :mod:`~lightning_lowprec.masters.optimizer` uses the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.optimizer import ScaledOptimizer, check_options
from lightning_lowprec.msamp.sgd import ScaledSGD
from lightning_lowprec.msamp.weight import Level, msamp_state_of
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MSAMP, check_step

_CLASSES: Final[Mapping[type[Any], type[ScaledOptimizer]]] = {
    AdamW: ScaledAdamW,
    Adam: ScaledAdamW,  # without weight decay Adam is AdamW
    SGD: ScaledSGD,
}
SUPPORTED: Final = (
    "torch.optim.AdamW, torch.optim.Adam with weight_decay=0, torch.optim.SGD, and lightning_lowprec.msamp's"
    " ScaledAdamW and ScaledSGD"
)


def convert_optimizer_(optimizer: Optimizer, level: Level, *, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Let ``optimizer`` step parameters of codes, in place; an optimizer without such parameters does not change.

    If all parameters of codes are frozen, optimizers that are not supported do not change either. A second call changes
    nothing. For the options see :class:`~lightning_lowprec.msamp.optimizer.ScaledOptimizer`.

    Raises:
        TypeError: another optimizer.
        ValueError: an option that is not possible with MS-AMP, or an optimizer of another level.
        RuntimeError: somebody replaced ``optimizer.step``.
    """
    coded = [p for p in parameters_of(optimizer) if msamp_state_of(p) is not None]
    if not coded:
        return
    if isinstance(optimizer, ScaledOptimizer):
        if optimizer.level != level:
            raise ValueError(f"the optimizer has `level={optimizer.level!r}`; expected {level!r}, that of the weights.")
        check_options(optimizer)
    elif type(optimizer) in _CLASSES:
        check_options(optimizer)
        _convert(optimizer, level=level, stochastic_rounding=stochastic_rounding, seed=seed, compile=False)
    elif any(p.requires_grad for p in coded):
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot step weights that are kept as codes with a scale (MS-AMP"
            f" {level}); expected one of: {SUPPORTED}."
        )


def _convert(optimizer: Any, **options: Any) -> None:
    check_step(optimizer, MSAMP)
    saved = optimizer.state_dict() if optimizer.state else None
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, which calls the old class; the new class needs none
    optimizer.__class__ = _CLASSES[type(optimizer)]
    Optimizer.__setstate__(optimizer, {**options, "_flat_steps": {}})  # gives the new class its step hooks
    if saved is not None:
        optimizer.load_state_dict(saved)
