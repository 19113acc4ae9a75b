"""int8 training through torchao: both operands of each product have int8 codes with a scale per row."""

from dataclasses import dataclass, field
from typing import Literal, final

import torch
from typing_extensions import override

from lightning_lowprec.conversion.options import shows, takes
from lightning_lowprec.hardware import describe
from lightning_lowprec.torchao.plugin import ProductsPerLayer, SharedOptions, TorchAO


@dataclass(frozen=True, kw_only=True)
class Int8Options(SharedOptions):
    """The arguments of :class:`Int8TorchAO`."""

    recipe: Literal["int8"] | ProductsPerLayer = field(default="int8", kw_only=False)


@final
@shows()
class Int8TorchAO(TorchAO):
    """The GEMMs of the Linear layers in int8, everything else under autocast; float32 weights unless told otherwise.

    Both operands of each GEMM get int8 codes with a scale per row (``torchao.prototype.quantized_training``). Stacked
    experts stay in the base dtype. FSDP2 gathers weights in the base dtype.

    Args:
        recipe: ``"int8"``, or recipes per layer as in :class:`~lightning_lowprec.FP8TorchAO`:
            ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}`` computes one of the GEMMs in high precision.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: torchao is too old.
    """

    @takes(Int8Options)
    def __init__(self, options: Int8Options) -> None:
        super().__init__(options.recipe, ("int8",), options)
        self.precision += ("" if isinstance(options.recipe, str) else "-per-layer") + self.suffix

    @override
    def how(self, device: torch.device) -> str:
        if device.type == "cuda":
            return f"int8 GEMMs by torchao's Triton kernel on {describe(device)}"
        return f"int8 GEMMs by torch._int_mm on {describe(device)}: the codes of a GPU; slow"
