"""Tell whether Transformer Engine imports, and which of its recipes a device runs, in the library's own words."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.hardware import describe, every_gpu_has_fp8
from lightning_lowprec.private.transformer_engine import check_names

MODULE = "transformer_engine.pytorch"


def runs_here() -> bool:
    """Return whether Transformer Engine is installed and every GPU has FP8; raise ImportError if it is broken then."""
    if find_spec("transformer_engine") is None or not torch.cuda.is_available() or not every_gpu_has_fp8():
        return False
    pytorch("FP8 by Transformer Engine, which is installed and therefore preferred,")
    return True


def pytorch(purpose: str) -> Any:
    """Import and return ``transformer_engine.pytorch``.

    Raises:
        ModuleNotFoundError: Transformer Engine is not installed; the message has the command that installs it.
        ImportError: Transformer Engine is installed, but does not import or lacks private names that we use.
    """
    module = require(MODULE, purpose)
    check_names()
    return module


def device_refusal(kind: str, device: torch.device) -> str | None:
    """Return the reason why ``device`` cannot run a kind of recipe (see ``recipes.kind_of``), or None."""
    refusal = import_refusal(MODULE, f"The recipe {kind!r}")
    if refusal is not None:
        return refusal.rstrip(".")
    if device.type != "cuda":
        return f"Transformer Engine computes on NVIDIA GPUs only, and this is {device.type}"
    te = pytorch(kind)
    checks = {
        "block": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }
    try:
        with torch.cuda.device(device):
            available, reason = checks.get(kind, te.is_fp8_available)(return_reason=True)
    except RuntimeError as error:  # raised without a driver
        return str(error).splitlines()[0].rstrip(".")
    return None if available else f"Transformer Engine says of {describe(device)}: {reason.rstrip('.')}"
