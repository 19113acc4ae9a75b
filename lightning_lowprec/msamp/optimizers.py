"""Convert an AdamW or Adam that holds weights of codes to ScaledAdamW and back, in place: the object stays."""

from typing import Any, Final

from torch.optim import Adam, AdamW, Optimizer

from lightning_lowprec.masters.moments import params_by_key
from lightning_lowprec.msamp.adamw import ALIVE, OPTIONS, ScaledAdamW, check_options
from lightning_lowprec.msamp.weight_state import Level, msamp_state_of
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import MSAMP
from lightning_lowprec.private.torch_optimizers import check_step, refuse_copies

SUPPORTED: Final = "torch.optim.AdamW, torch.optim.Adam, lightning_lowprec.msamp.ScaledAdamW"


def scaled_optimizers() -> list[Optimizer]:
    """Return every ScaledAdamW that still exists."""
    return [optimizer for optimizer in ALIVE if isinstance(optimizer, ScaledAdamW)]


def convert_optimizer_(optimizer: Optimizer, level: Level) -> None:
    """Let ``optimizer`` step parameters of codes, in place; an optimizer without such parameters does not change.

    If all parameters of codes are frozen, optimizers that are not supported do not change either. A second call changes
    nothing.

    Raises:
        TypeError: another optimizer.
        ValueError: an option that is not possible with MS-AMP, or an optimizer of another level.
        RuntimeError: somebody replaced ``optimizer.step``.
    """
    refuse_copies(optimizer, "the weights of MS-AMP, which are codes")
    coded = [p for p in parameters_of(optimizer) if msamp_state_of(p) is not None]
    if not coded:
        return
    if isinstance(optimizer, ScaledAdamW):
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
        options: dict[str, object] = {"level": level, "compile": "auto", "plain_class": plain}
        ScaledAdamW.__setstate__(scaled, options)  # gives the new class its step hooks
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
    if coded or not isinstance(optimizer, ScaledAdamW):
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
