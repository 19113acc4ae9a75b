"""The machine, the versions, and what a guess without a model would reach."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.digits import CLASSES
from benchmarks.convergence.subjects import Subject
from benchmarks.convergence.text import parts
from benchmarks.machine import versions

PACKAGES = (
    "lightning-lowprec", "torch", "lightning", "torchao", "transformers", "peft", "numpy", "pillow", "matplotlib",
)  # fmt: skip
_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, Any]:
    """Return the CPU and the versions; no name of a host."""
    return {
        "cpu": f"{cpu_model()} ({platform.machine()})",
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
    }


def cpu_model() -> str:
    """Return the model of the CPU as Linux says it, else as Python does."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def guesses(subjects: Sequence[Subject]) -> dict[str, dict[str, Any]]:
    """Return the loss of a guess for each subject: by the frequencies of the bytes, or equal for all digits."""
    found = {}
    for subject in subjects:
        if subject.reads_text:
            loss = frequency_loss(*parts(python=subject.data.endswith("StdlibText")))
            found[subject.key] = {"words": "a guess by the frequencies of bytes", "loss": loss}
        else:
            found[subject.key] = {"words": "a guess with equal chances", "loss": math.log(CLASSES)}
    return found


def frequency_loss(train: Tensor, val: Tensor) -> float:
    """Return the mean of ``-log p(byte)`` over ``val`` in nats, p from the counts in ``train``, each plus one."""
    counts = torch.bincount(train, minlength=256).double() + 1
    share = torch.bincount(val, minlength=256).double() / len(val)
    return float(-(share * (counts / counts.sum()).log()).sum())
