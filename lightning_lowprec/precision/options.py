"""Options that precision plugins share: loss scaling, and how FP8 layers run. Each is defined and documented once.

See :mod:`lightning_lowprec.conversion.options` for how the options of a group become parameters of a plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch

from lightning_lowprec.checks import check_choice
from lightning_lowprec.precision.loss_scale import LossScale

Base = Literal["bf16", "fp16"]
BASE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossScaleChoice = Literal["auto", "dynamic"] | float | LossScale | None


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """How the loss is scaled.

    Args:
        loss_scale: ``"auto"`` scales dynamically with fp16 and not at all with bf16. ``"dynamic"``, a number (a static
            scale) or a :class:`~lightning_lowprec.LossScale` are for fp16 only.
    """

    loss_scale: LossScaleChoice = "auto"

    def resolve(self, base: Base) -> LossScale | None:
        """The loss scale for a base dtype, or None for an unscaled loss.

        Raises:
            ValueError: a scale with bf16, no scale with fp16, or a value that is no scale.
        """
        choice = self.loss_scale
        if choice == "auto":
            return LossScale() if base == "fp16" else None
        if choice is None:
            if base == "fp16":
                raise ValueError(
                    "`loss_scale=None` is not valid with fp16, whose gradients underflow below 6e-8; expected 'auto',"
                    " 'dynamic', a number or a LossScale, or use bf16."
                )
            return None
        if base == "bf16":
            raise ValueError(
                f"`loss_scale={choice!r}` is not valid with bf16, which has the range of float32; expected 'auto' or"
                " None, or use fp16."
            )
        return LossScale.of(choice)


class LossScaleChoices(TypedDict, total=False):
    """The fields of :class:`LossScaleOptions`, for type checkers."""

    loss_scale: LossScaleChoice


@dataclass(frozen=True, kw_only=True)
class FP8Options:
    """How a model with FP8 layers runs outside of their GEMMs, in evaluation, and without FP8 hardware.

    Args:
        base: dtype of every operation outside of FP8: ``"bf16"``, or ``"fp16"`` with loss scaling.
        fp8_eval: whether validation, test and prediction run in FP8 too.
        emulate: multiply dequantised codes in float32 instead of calling FP8 kernels. None: yes on CPU, no on a GPU,
            and a GPU without FP8 raises.
    """

    base: Base = "bf16"
    fp8_eval: bool = True
    emulate: bool | None = None

    def __post_init__(self) -> None:
        """Check every field; nothing is changed here."""
        check_choice("base", self.base, get_args(Base))


class FP8Choices(TypedDict, total=False):
    """The fields of :class:`FP8Options` that every backend takes, for type checkers."""

    base: Base
    fp8_eval: bool


class EmulationChoices(TypedDict, total=False):
    """The field of :class:`FP8Options` for backends that can emulate FP8, for type checkers."""

    emulate: bool | None
