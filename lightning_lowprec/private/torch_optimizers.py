"""What optimizers allow, and how their step hooks and schedulers notice steps; `torch.py` lists the private names."""

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, final

from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim import optimizer as module
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_lowprec.private.torch import version_of
from lightning_lowprec.private.torchao import parameters_of_copies

F = TypeVar("F", bound=Callable[..., object])
_SEES_NO_MASTERS: Final = "lowprec_sees_no_masters"
_ALONE: Final = (
    optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.Muon,
    optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
)  # fmt: skip
ALONE: Final = "independent_parameters"
"""An attribute by which the class of an optimizer says that it updates each parameter without looking at others."""


def check_step(optimizer: Optimizer, part: str) -> None:
    """Raise if ``optimizer.step`` was replaced by anything but a scheduler: a new class would have no effect."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the instance attribute `step` of this {type(optimizer).__name__} hides its class, which must change for"
            f" {part}. Set the optimizer up before anything that replaces its `step`."
        )


STEPPED: Final = "_opt_called"
"""An attribute of optimizers by which schedulers know that a step was made."""


def known_to_schedulers(step: F) -> F:
    """Decorate the ``step`` of an optimizer's class that sets :data:`STEPPED`: schedulers do not wrap it."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def replaces_step(step: F) -> F:
    """Decorate the ``step`` of an optimizer's class that calls another class's ``step``, where torch runs the hooks."""
    step.hooked = True  # type: ignore[attr-defined]
    return known_to_schedulers(step)


def steps_alone(optimizer: Optimizer, plain: type) -> bool:
    """Return whether ``optimizer``, of class ``plain``, may step its parameters in several calls, some at a time.

    True for the classes of ``torch.optim`` except LBFGS, and for classes that say so (:data:`ALONE`). Step hooks must
    see all masters at once.
    """
    if plain not in _ALONE and vars(plain).get(ALONE) is not True:
        return False
    seen: Any = optimizer
    for hook in (*module._global_optimizer_pre_hooks.values(), *module._global_optimizer_post_hooks.values()):
        if not hasattr(hook, _SEES_NO_MASTERS):
            return False
    return not seen._optimizer_step_pre_hooks and not seen._optimizer_step_post_hooks


def sees_no_masters(hook: F) -> F:
    """Decorate a step hook that does not look at the optimizer's parameters."""
    setattr(hook, _SEES_NO_MASTERS, True)
    return hook


def brings_masters(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one of FlashOptim's, which keep digits of half-precision weights themselves."""
    return any(cls.__name__ == "FlashOptimizer" for cls in type(optimizer).__mro__)


def refuse_copies(optimizer: Optimizer, what: str) -> None:
    """Raise if ``optimizer`` is torchao's ``CPUOffloadOptimizer``, which steps copies of the parameters in CPU memory.

    Masters, loss scaling and clipping would see the copies, or change gradients that were copied before. ``what`` is
    the middle of the message.
    """
    if parameters_of_copies(optimizer) is not None:
        raise TypeError(
            f"`{type(optimizer).__name__}` of torchao does not go with {what}. Use"
            " `strategy=FSDP2Strategy(cpu_offload=True)`, on one device too, or a precision with float32 weights and"
            " without loss scaling, such as 'bf16-mixed', 'half-auto' or 'fp8-hybrid'."
        )


# ---- steps are counted, so that codes of a stale weight are not used

Seen = tuple[int, ...]


@final
class Steps:
    """The steps of all optimizers of this process."""

    count = 0


@sees_no_masters
def count_step(*_: object) -> None:
    """Note that an optimizer made a step."""
    Steps.count += 1


@functools.cache
def watch() -> None:
    """Count steps from now on; whoever keeps codes calls this."""
    register_optimizer_step_post_hook(count_step)


def seen(weight: Tensor, *, training: bool, steps: bool = True) -> Seen:
    """Return a value that changes when ``weight`` may have changed; ``steps``: whether a step may change it.

    ``weight.data = other`` and ``vector_to_parameters`` change the place in memory and no version; a kernel may change
    neither; and in evaluation averaged weights may be in place. The only change that cannot be seen is a write in place
    through ``weight.data``, between two micro-batches.
    """
    return id(weight), weight.data_ptr(), version_of(weight), Steps.count if steps else -1, training
