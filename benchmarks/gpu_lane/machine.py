"""What the figures were taken on, and with what."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FURTHER = ("triton", "accelerate", "transformers", "numpy")
COMMIT = "LOWPREC_COMMIT"
"""Environment variable that names the commit where the tree travels without its ``.git``."""


def facts(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, memory."""
    from lightning_lowprec.tools.doctor import machine

    found = machine(device)
    found["versions"] |= versions(FURTHER)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    found["cores"] = os.cpu_count()
    return found


def commit() -> str:
    """The commit of this tree, ``+`` if files differ from it."""
    given = os.environ.get(COMMIT)
    if given:
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return f"unknown (no git here; set {COMMIT})"


def _git(*args: str) -> str:
    result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    return result.stdout.strip()


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of packages, None for one that is not installed."""
    installed = {name: found.version for name in packages for found in distributions(name=name)}
    return {name: installed.get(name) for name in packages}
