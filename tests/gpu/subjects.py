"""The FP8 names that the GPU tests run, and how they measure noise."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import availability
from tests.gpu.device import DEVICE, NO_VALUES
from tests.representatives import representatives

REHEARSED = ("fp8-hybrid-fp16", "fp8-hybrid-te")
"""Where nothing is computed these stand for all: tests/ledger/test_every_name.py trains each name there."""
FP8_NAMES = [
    name
    for name in representatives()
    if TABLE[name].plugin.__name__.startswith("FP8") and (name in REHEARSED or not NO_VALUES)
]


def runs_here(name: str) -> str | None:
    """Why a name cannot run on this machine (a missing library, another GPU's recipe), or None."""
    verdict = availability(name, DEVICE)
    return None if verdict.runs else verdict.reason


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to noise in dB."""
    reference, value = reference.double().cpu(), value.double().cpu()
    noise = (reference - value).pow(2).sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(reference.pow(2).sum() / noise))
