"""Which loss scale goes with which base dtype and optimizer: needed for fp16, refused for bf16 and LBFGS."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, Optimizer

from lightning_lowprec.precision.loss_scale import LossScale

LossScaleChoice = Literal["auto", "dynamic"] | float | LossScale | None


def resolve_loss_scale(base: Literal["bf16", "fp16"], loss_scale: LossScaleChoice) -> LossScale | None:
    """The loss scale for a base dtype.

    Raises:
        ValueError: a scale with bf16, none with fp16, or a value that is no scale.
    """
    if loss_scale == "auto":
        return LossScale() if base == "fp16" else None
    if loss_scale is None:
        if base == "fp16":
            raise ValueError(
                "`loss_scale=None` is not valid with fp16, whose gradients underflow below 6e-8; expected 'auto',"
                " 'dynamic', a number or a LossScale, or use bf16."
            )
        return None
    if base == "bf16":
        raise ValueError(
            f"`loss_scale={loss_scale!r}` is not valid with bf16, which has the range of float32; expected 'auto' or"
            " None, or use fp16."
        )
    return LossScale.of(loss_scale)


def check_optimizer(precision: str, optimizer: Optimizer) -> None:
    """Raise if ``optimizer`` cannot step on a scaled loss.

    Raises:
        MisconfigurationException: it is LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            f"`precision={precision!r}` scales the loss, and LBFGS evaluates the closure many times per step:"
            " they do not go together. Use a bf16 precision, or another optimizer."
        )
