"""Whether Transformer Engine imports, and which of its recipes a device runs, in Transformer Engine's own words."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from lightning_lowprec.extras import INSTALL, import_refusal, require
from lightning_lowprec.hardware import describe, every_gpu_has_fp8

MODULE = "transformer_engine.pytorch"


def is_installed() -> bool:
    """Whether there is a Transformer Engine at all, working or broken; nothing is imported."""
    return find_spec("transformer_engine") is not None


def status() -> str:
    """Whether it is there and imports, and if not, why and what to install, in one line."""
    if not is_installed():
        return f"not installed: `{INSTALL['transformer_engine']}`"
    refusal = import_refusal(MODULE, "FP8TE")
    return refusal.splitlines()[0] if refusal is not None else "imports"


def runs_here() -> bool:
    """Whether Transformer Engine is installed and every GPU of this machine has FP8; False without a GPU.

    Raises:
        ImportError: it is installed and there are such GPUs, but it does not import.
    """
    if not is_installed() or not torch.cuda.is_available() or not every_gpu_has_fp8():
        return False
    pytorch("FP8 by Transformer Engine, which is installed and therefore preferred,")
    return True


def pytorch(purpose: str) -> Any:
    """``transformer_engine.pytorch``.

    Raises:
        ModuleNotFoundError: it is not installed; the message says what to install.
        ImportError: it is installed but does not import, with the reason.
    """
    return require(MODULE, purpose)


def device_refusal(kind: str, device: torch.device) -> str | None:
    """Why ``device`` cannot run a kind of recipe (see :data:`~lightning_lowprec.te.recipes.KINDS`), or None."""
    refusal = import_refusal(MODULE, f"The recipe {kind!r}")
    if refusal is not None:
        return refusal.rstrip(".")
    if device.type != "cuda":
        return f"Transformer Engine computes on NVIDIA GPUs only, and this is {device.type}"
    te = pytorch(kind)
    check = {
        "delayed": te.is_fp8_available,
        "current": te.is_fp8_available,
        "block": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }.get(kind, te.is_fp8_available)
    try:
        with torch.cuda.device(device):
            available, reason = check(return_reason=True)
    except RuntimeError as error:  # without a driver they raise
        return str(error).splitlines()[0].rstrip(".")
    return None if available else f"Transformer Engine says of {describe(device)}: {reason.rstrip('.')}"
