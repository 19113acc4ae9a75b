"""What the rest of the package knows about the Transformer Engine backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from lightning_lowprec.te import support
from lightning_lowprec.te.plugin import BACKEND as NAME
from lightning_lowprec.te.plugin import FP8TE
from lightning_lowprec.te.recipes import ALIGNMENT

_DELAYED: Final = "Transformer Engine, scales from the amax of past steps"
_NAMES: Final = {
    "fp8-hybrid-te": PrecisionName(plugin=FP8TE, summary=f"{_DELAYED}, gradients in e5m2", fp16=True, gathers_fp8=True),
    "fp8-e4m3-te": PrecisionName(
        plugin=FP8TE,
        options={"fp8_format": "e4m3"},
        summary=f"{_DELAYED}, e4m3 everywhere",
        fp16=True,
        gathers_fp8=True,
    ),
    "fp8-current": PrecisionName(
        plugin=FP8TE,
        options={"recipe": "current"},
        summary="Transformer Engine, scales from each tensor, gradients in e5m2",
        fp16=True,
        gathers_fp8=True,
    ),
    "fp8-block": PrecisionName(
        plugin=FP8TE,
        options={"recipe": "block"},
        summary="Transformer Engine, a scale per 128 values or 128x128 weights, e4m3",
    ),
    "mxfp8": PrecisionName(
        plugin=FP8TE,
        options={"recipe": "mxfp8"},
        summary="Transformer Engine, a power-of-two scale per 32 values, e4m3 (Blackwell)",
        alignment=ALIGNMENT["mxfp8"],
    ),
    "nvfp4": PrecisionName(
        plugin=FP8TE,
        options={"recipe": "nvfp4"},
        summary="Transformer Engine, 4 bits with a scale per 16 values (Blackwell)",
        alignment=ALIGNMENT["nvfp4"],
    ),
}


def _revert(model: nn.Module) -> None:
    from lightning_lowprec.te.convert import revert

    revert(model)


def _checkpoint() -> Callable[..., Any]:
    """Transformer Engine's checkpoint restores the scales of its layers before it recomputes them."""
    checkpoint: Callable[..., Any] = support.pytorch("activation checkpointing of its layers").checkpoint
    return checkpoint


BACKEND: Final = Backend(
    name=NAME,
    title="Transformer Engine",
    names=_NAMES,
    suffix="-te",
    # under FSDP2 torchao is preferred: its layers go with compilation and tensor parallelism
    preferred=lambda sharded: not sharded and support.runs_here(),
    module=support.MODULE,
    distribution="transformer-engine",
    layers_from=("transformer_engine.", "lightning_lowprec.te."),
    revert=_revert,
    cuts_layers=False,
    checkpoint=_checkpoint,
)
