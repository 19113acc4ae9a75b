"""Converting an AdamW, Adam or SGD that holds parameters of codes, in place: the optimizer object stays.

    optimizer = torch.optim.AdamW(model.parameters())
    scale_linears(model, ["fc"], "O2")
    convert_optimizer_(optimizer, "O2")      # with or without a scheduler, before or after its first step

Groups, learning rate, state and schedulers stay. State dicts have float32 moments, like those of the plain optimizer:
the plain optimizer loads them, and its state dicts load here. At level O3 they also have the ``master_param`` (float32)
of every weight that was stepped; :mod:`~lightning_lowprec.masters.optimizer` uses the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.optimizer import ScaledOptimizer
from lightning_lowprec.msamp.sgd import ScaledSGD
from lightning_lowprec.msamp.weight import Level, msamp_state_of
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MSAMP, check_step

SUPPORTED: Final = (
    "torch.optim.AdamW, torch.optim.Adam with weight_decay=0, torch.optim.SGD, and lightning_lowprec.msamp's"
    " ScaledAdamW and ScaledSGD"
)
_REFUSED_OPTIONS: Final = ("amsgrad", "maximize", "capturable", "differentiable")


def convert_optimizer_(optimizer: Optimizer, level: Level, *, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Let ``optimizer`` step parameters of codes, in place; an optimizer without such parameters does not change.

    If all parameters of codes are frozen, optimizers that are not supported do not change either.

    Args:
        optimizer: see ``SUPPORTED``; a second call changes nothing.
        level: the level of the parameters.
        stochastic_rounding: see :class:`~lightning_lowprec.msamp.optimizer.ScaledOptions`.
        seed: of the stochastic rounding.

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
        if isinstance(optimizer, _Converted):
            _check_options(optimizer)
        return
    target = _CLASSES.get(type(optimizer))
    if target is not None:
        _check_options(optimizer)
        _convert(optimizer, target, {"level": level, "stochastic_rounding": stochastic_rounding, "seed": seed})
    elif any(p.requires_grad for p in coded):
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot step weights that are kept as codes with a scale (MS-AMP"
            f" {level}); expected one of: {SUPPORTED}."
        )


def _check_options(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for name in _REFUSED_OPTIONS:
            if group.get(name):
                raise ValueError(f"`{name}={group[name]!r}` of {type(optimizer).__name__} is not possible with MS-AMP.")
        decay = group["weight_decay"]
        decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
        if decay and isinstance(optimizer, Adam) and not decoupled:
            raise ValueError(
                f"`weight_decay={decay!r}` of Adam, which is part of its gradient, is not possible with MS-AMP. Use"
                " `torch.optim.AdamW`, whose weight decay is not."
            )


def _convert(optimizer: Any, target: type[_Converted], options: Mapping[str, Any]) -> None:
    check_step(optimizer, MSAMP)
    saved = optimizer.state_dict() if optimizer.state else None
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, which calls the old class; the new class needs none
    optimizer.__class__ = target
    Optimizer.__setstate__(optimizer, {**options, "_flat_steps": {}})  # gives the new class its step hooks
    if saved is not None:
        optimizer.load_state_dict(saved)


class _Converted(ScaledOptimizer):
    """The first base class of converted optimizers: state dicts of the plain optimizer."""

    @override
    def _saves_values(self, p: Tensor) -> bool:
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain optimizer; at level O3 with the master of every weight."""
        state_dict = super().state_dict()
        for entry in state_dict["state"].values():
            if "step" in entry:
                entry["step"] = torch.as_tensor(float(entry["step"]))
        return state_dict

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore attributes. Adam's method is left out, because it would make tensors of the step counts."""
        Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


@final
class ConvertedAdamW(_Converted, ScaledAdamW, AdamW):
    """A torch AdamW after :func:`convert_optimizer_`."""


@final
class ConvertedAdam(_Converted, ScaledAdamW, Adam):
    """A torch Adam after :func:`convert_optimizer_`; without weight decay Adam is AdamW."""


@final
class ConvertedSGD(_Converted, ScaledSGD, SGD):
    """A torch SGD after :func:`convert_optimizer_`."""


_CLASSES: Final[Mapping[type[Any], type[_Converted]]] = {AdamW: ConvertedAdamW, Adam: ConvertedAdam, SGD: ConvertedSGD}
