"""Which loss scale goes with which base dtype: needed for fp16, refused for bf16."""

from __future__ import annotations

from typing import Literal

from lightning_lowprec.optim import LossScale

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
