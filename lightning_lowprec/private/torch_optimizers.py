"""How torch's optimizers, their step hooks and schedulers notice steps; `torch.py` has the list of these names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])
_SEES_NO_MASTERS: Final = "lowprec_sees_no_masters"


def check_step(optimizer: Optimizer, part: str) -> None:
    """Raise if ``optimizer.step`` was replaced by anything but a scheduler: a new class would have no effect.

    Raises:
        RuntimeError: ``step`` was replaced.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the instance attribute `step` of this {type(optimizer).__name__} hides its class, which must change for"
            f" {part}. Set the optimizer up before anything that replaces its `step`."
        )


def noted_by_schedulers(step: F) -> F:
    """Decorate the ``step`` of an optimizer's class: tell schedulers about every call, so that they do not wrap it."""

    @functools.wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return noted  # type: ignore[return-value]


def without_own_hooks(step: F) -> F:
    """Decorate a ``step`` that calls another class's ``step``: torch runs the step hooks there, so not here too."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a hook runs before or after the steps of ``optimizer``, or of every optimizer."""
    from torch.optim import optimizer as module

    own: Any = optimizer
    hooks = (own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks)
    of_all = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    return any(hooks) or any(not hasattr(hook, _SEES_NO_MASTERS) for group in of_all for hook in group.values())


def sees_no_masters(hook: F) -> F:
    """Decorate a step hook that does not look at the optimizer's parameters."""
    setattr(hook, _SEES_NO_MASTERS, True)
    return hook
