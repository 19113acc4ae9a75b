"""Options that precision plugins share: loss scaling and FP8 layers. Each option is defined and documented once.

See :mod:`lightning_lowprec.conversion.options`, which makes parameters of a plugin from the options of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from lightning_lowprec.conversion.options import Group
from lightning_lowprec.precision.loss_scale import LossScale, LossScaler, StaticScale

Base = Literal["bf16", "fp16"]
Head = Literal["bf16", "chunked", "fp8", "fp32"]
BASE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossScaleChoice = Literal["auto", "dynamic"] | StaticScale | LossScale | None


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions(Group):
    """Options of the loss scale, and of steps whose gradients are not finite.

    Args:
        loss_scale: ``"auto"`` scales dynamically with fp16 and not at all with bf16. ``"dynamic"``, a number (a static
            scale) and a :class:`~lightning_lowprec.LossScale` are for fp16 only.
        skip_nonfinite: skip an optimizer step, on all ranks, if a gradient is NaN or inf: weights, optimizer state and
            scales stay those before the step. fp16 always does so. False lets bf16 step as ``bf16-mixed`` does. 50
            skipped steps in a row raise. Buffers that the forward has changed (BatchNorm's) are not restored.
    """

    loss_scale: LossScaleChoice = "auto"
    skip_nonfinite: bool = False

    def resolve(self, base: Base) -> LossScale | None:
        """Return the loss scale for a base dtype, or None for an unscaled loss."""
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

    def scaler(self, base: Base) -> LossScaler | None:
        """Return what scales the loss and skips steps for a base dtype; None: every step is made, unscaled."""
        scale = self.resolve(base)
        return None if scale is None and not self.skip_nonfinite else LossScaler(scale)


class LossScaleChoices(TypedDict, total=False):
    """The fields of :class:`LossScaleOptions`, for type checkers."""

    loss_scale: LossScaleChoice
    skip_nonfinite: bool


@dataclass(frozen=True, kw_only=True)
class FP8Options(Group):
    """Options of FP8 layers: the dtype outside of their GEMMs, evaluation, and emulation without FP8 hardware.

    Args:
        base: dtype of every operation outside of FP8: ``"bf16"``, or ``"fp16"`` with loss scaling.
        fp8_eval: whether validation, test and prediction run in FP8 too.
        emulate: multiply dequantised codes in float32 instead of calling FP8 kernels. None: True on CPU, False on a
            GPU; a GPU without FP8 then raises.
    """

    base: Base = "bf16"
    fp8_eval: bool = True
    emulate: bool | None = None


class FP8Choices(TypedDict, total=False):
    """The fields of :class:`FP8Options` that every backend takes, for type checkers."""

    base: Base
    fp8_eval: bool


class EmulationChoices(TypedDict, total=False):
    """The field of :class:`FP8Options` for backends that can emulate FP8, for type checkers."""

    emulate: bool | None


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Group):
    """Options of the output head of a causal language model, and of its loss.

    Args:
        head: ``"bf16"`` leaves the head and the loss of the model alone; they run under autocast. ``"chunked"``
            computes the loss from hidden states in training, some tokens at a time, and never all logits at once; the
            logits of the model's output are computed if they are read. ``"fp8"`` does so with matrix products in FP8,
            ``"fp32"`` in float32, with float32 logits in evaluation too; ``keep_fp32=["lm_head"]`` keeps the weight in
            float32 as well. All three are for causal models of ``transformers`` that are recognised exactly, and raise
            for others. For them there is ``lightning_lowprec.losses.linear_cross_entropy``.
    """

    head: Head = "bf16"


class HeadChoices(TypedDict, total=False):
    """The fields of :class:`HeadOptions`, for type checkers."""

    head: Head
