"""A device that computes nothing: it records launches, hands out memory and leaves every value as it was.

The lane and ``tests/gpu`` run to their ends there, which finds every crash in Python before a GPU is there. Whatever
follows from values or from time is off, and cuDNN and NCCL, which such a device lacks, are not used.
"""

from __future__ import annotations

import os

import torch

NO_VALUES = "LOWPREC_NO_VALUES"
"""Environment variable: any text but an empty one or ``0`` says that the device computes nothing."""
NO_LIMIT = 24 * 3600.0
"""Seconds that stand for no limit."""


def values_exist() -> bool:
    """Return whether tensors hold what was computed, and time passes as on a real device."""
    return os.environ.get(NO_VALUES, "") in ("", "0")


def time_limit(seconds: float) -> float:
    """Return ``seconds``; no limit where time means nothing."""
    return seconds if values_exist() else NO_LIMIT


def use_what_the_device_has() -> None:
    """Turn cuDNN attention off where nothing computes: torch would choose it, and it has no library there."""
    if not values_exist():
        torch.backends.cuda.enable_cudnn_sdp(False)
