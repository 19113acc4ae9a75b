"""The option ``experts`` of FP8TorchAO: whether stacked experts run in FP8, and why they do not."""

from __future__ import annotations

from typing import Any, Literal

import torch

from lightning_lowprec.conversion.selection import GROUPED_ROUND_TO_BF16
from lightning_lowprec.hardware import refusal

Experts = Literal["auto", "fp8", "bf16"]


def experts_kept(choice: Experts, base: str, config: Any, device: torch.device | None) -> str | None:
    """Return why stacked experts stay in the base dtype; None: they convert.

    Args:
        choice: the option.
        base: the dtype outside of FP8.
        config: the user's ``Float8LinearConfig``, or None.
        device: the device whose kernels run; None if FP8 is emulated.

    Raises:
        ValueError: ``choice`` is ``"fp8"``, and experts cannot run in FP8.
    """
    if choice == "bf16":
        return "stacked experts (experts='bf16')"
    reason = None
    if base == "fp16":
        reason = GROUPED_ROUND_TO_BF16
    elif config is not None:
        reason = "stacked experts (`config` says nothing about grouped products)"
    elif device is not None and device.type == "cpu":  # which multiplies float8, with `emulate=False`
        reason = "stacked experts (cpu has no FP8 kernel for grouped products)"
    elif device is not None and (unable := refusal("experts", device)) is not None:
        reason = f"stacked experts ({unable})"
    if reason is not None and choice == "fp8":
        raise ValueError(f"`experts='fp8'` is not possible: {reason}. Use `experts='bf16'`.")
    return reason
