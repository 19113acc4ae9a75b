"""Tell whether Transformer Engine imports, and which of its recipes a device runs, in the library's own words."""

from typing import Any

import torch

from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.hardware import describe, refusal_and_remedy
from lightning_lowprec.private.transformer_engine import check_names
from lightning_lowprec.runs_where import RECIPES, RecipeKey
from lightning_lowprec.te.recipes import MODULE


def pytorch(purpose: str) -> Any:
    """Import and return ``transformer_engine.pytorch``, or raise ImportError with the command that installs it.

    An installed Transformer Engine that lacks private names which we use raises too.
    """
    module = require(MODULE, purpose)
    check_names()
    return module


def device_refusal(kind: str, device: torch.device) -> str | None:
    """Return the reason why ``device`` cannot run a kind of recipe (see ``recipes.kind_of``), and the remedy, or None.

    The table of what runs where answers first, then Transformer Engine, which also asks for versions of CUDA.
    ``"nvfp4-plain"`` is NVFP4 without Hadamard transform and stochastic rounding.
    """
    refusal = import_refusal(MODULE, f"The recipe {kind!r}")
    if refusal is not None:
        return refusal.rstrip(".")
    row: RecipeKey = next((recipe for recipe in RECIPES if recipe == f"te-{kind}"), "te-current")
    try:
        if (known := refusal_and_remedy(row, device)) is not None:
            return known
        te = pytorch(kind)
        checks = {
            "block": te.is_fp8_block_scaling_available,
            "mxfp8": te.is_mxfp8_available,
            "nvfp4": te.is_nvfp4_available,
        }
        with torch.cuda.device(device):
            available, reason = checks.get(kind.removesuffix("-plain"), te.is_fp8_available)(return_reason=True)
    except (RuntimeError, AssertionError) as error:  # raised without a driver
        return f"{str(error).splitlines()[0].rstrip('.')}. Use a machine with a driver, or 'bf16-mixed'"
    if available:
        return None
    works = "'bf16-mixed'" if row in ("te-delayed", "te-current") else "'fp8-current-te'"
    return f"Transformer Engine says of {describe(device)}: {reason.rstrip('.')}. Use {works}"
