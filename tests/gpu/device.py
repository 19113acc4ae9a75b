"""Where these tests run: on a CUDA device with FP8, or, to try the tests themselves, on CPU."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_lowprec.hardware import default_device, fp8_refusal

DRY = os.environ.get("LOWPREC_GPU_TESTS_ON") == "cpu"
"""A dry run: the tests' code on CPU, where FP8 is emulated; what only a GPU can show is skipped."""
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)
on_gpu_only = pytest.mark.skipif(DRY, reason="a dry run on CPU cannot show this")


def reason_to_skip() -> str | None:
    """Why there is nothing to test here, or None."""
    return None if DRY else fp8_refusal(default_device())
