"""Makes an AdamW or SGD that holds parameters of codes one that knows them, in place: the object stays.

    optimizer = torch.optim.AdamW(model.parameters())
    scale_linears(model, ["fc"], "O2")
    convert_optimizer_(optimizer, "O2")                   # with or without a scheduler, before or after its first step

Groups, learning rate, state and schedulers stay. State dicts are those of the plain optimizer, with float32 moments:
they load into it and come from it. At level O3 they also have the ``master_param`` (float32) of every weight that was
stepped, the name that :mod:`~lightning_lowprec.masters.optimizer` uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_lowprec.masters.optimizer import MASTER_PARAM
from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.optimizer import ScaledOptimizer
from lightning_lowprec.msamp.sgd import ScaledSGD
from lightning_lowprec.msamp.weight import Level, master_of, msamp_state_of, set_master_

SUPPORTED: Final = (
    "torch.optim.AdamW, torch.optim.Adam with weight_decay=0, torch.optim.SGD, and lightning_lowprec.msamp's"
    " ScaledAdamW and ScaledSGD"
)
_UNKNOWN: Final = ("amsgrad", "maximize", "capturable", "differentiable")


def convert_optimizer_(optimizer: Optimizer, level: Level, *, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Let ``optimizer`` step parameters of codes. One that holds none, or only frozen ones, stays as it is.

    Args:
        optimizer: see ``SUPPORTED``; a second call changes nothing.
        level: of the parameters.
        stochastic_rounding: of the float16 weight or master, see
            :class:`~lightning_lowprec.msamp.adamw.ScaledAdamW`.
        seed: of the stochastic rounding.

    Raises:
        TypeError: another optimizer.
        ValueError: an option that cannot be kept, or an optimizer of another level.
        RuntimeError: somebody replaced ``optimizer.step``.
    """
    coded = [p for p in _params(optimizer) if msamp_state_of(p) is not None]
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
        _change_class(optimizer, target, {"level": level, "stochastic_rounding": stochastic_rounding, "seed": seed})
    elif any(p.requires_grad for p in coded):
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot step weights that are kept as codes with a scale (MS-AMP"
            f" {level}); expected one of: {SUPPORTED}."
        )


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_options(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for name in _UNKNOWN:
            if group.get(name):
                raise ValueError(f"`{name}={group[name]!r}` of {type(optimizer).__name__} is not possible with MS-AMP.")
        decay = group["weight_decay"]
        decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
        if decay and isinstance(optimizer, Adam) and not decoupled:
            raise ValueError(
                f"`weight_decay={decay!r}` of Adam, which is part of its gradient, is not possible with MS-AMP. Use"
                " `torch.optim.AdamW`, whose weight decay is not."
            )


def _change_class(optimizer: Any, target: type[_Converted], options: Mapping[str, Any]) -> None:
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the instance attribute `step` of this {type(optimizer).__name__} hides its class, which MS-AMP changes."
            " Set the optimizer up before whatever replaces its `step`."
        )
    saved = optimizer.state_dict() if optimizer.state else None
    vars(optimizer).pop("step", None)
    optimizer.__class__ = target
    vars(optimizer).update(options, _flat_steps={})
    optimizer._patch_step_function()  # what Optimizer.__init__ does for a class: step hooks
    if step is not None:
        optimizer.step = _noted(optimizer)
    if saved is not None:
        optimizer.load_state_dict(saved)


def _noted(optimizer: Optimizer) -> Callable[..., Any]:
    """Notes that ``step`` was called, for the schedulers that asked for it before the class changed."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        live: Any = reference()
        live._opt_called = True
        return type(live).step(live, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


class _Converted(ScaledOptimizer):
    """What :func:`convert_optimizer_` puts in front of the class; never instantiated by itself."""

    @override
    def state_dict(self) -> dict[str, Any]:
        """That of the plain optimizer, with float32 moments and a step; at level O3 with the master of every weight."""
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        names = [*chain.from_iterable(group["params"] for group in state_dict["param_groups"])]
        for name, param in zip(names, _params(self), strict=True):
            if name in state:
                state[name] = _plain(state[name])
                master = master_of(param)
                if master is not None:
                    state[name][MASTER_PARAM] = master
        ordered = {name: state[name] for name in names if name in state}
        return {**state_dict, "state": ordered}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of any level, or of the plain optimizer; moments get fresh scales, masters are taken where they fit."""
        super().load_state_dict(state_dict)
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for name, param in zip(names, _params(self), strict=True):
            master = state_dict["state"].get(name, {}).get(MASTER_PARAM)
            if master is not None:
                set_master_(param, master)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Without Adam's own, which makes tensors of our step counts."""
        Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


@final
class ConvertedAdamW(_Converted, ScaledAdamW, AdamW):
    """An AdamW that was built as such."""


@final
class ConvertedAdam(_Converted, ScaledAdamW, Adam):
    """An Adam without weight decay, which is an AdamW without."""


@final
class ConvertedSGD(_Converted, ScaledSGD, SGD):
    """An SGD that was built as such."""


_CLASSES: Final[Mapping[type[Any], type[_Converted]]] = {AdamW: ConvertedAdamW, Adam: ConvertedAdam, SGD: ConvertedSGD}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Moments as float32 values, the step as a tensor; the master is left out."""
    plain: dict[str, Any] = {"step": torch.as_tensor(float(state["step"]))} if "step" in state else {}
    for key, value in state.items():
        scale = state.get(f"{key}_scale")
        if key != "step" and key != "master" and not key.endswith("_scale"):
            plain[key] = value if scale is None else value.float() / scale
    return plain
