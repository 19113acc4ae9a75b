"""int8 mixed-precision training through torchao: products of int8 codes, which Ampere and consumer cards have too."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from typing_extensions import Unpack, override

from lightning_lowprec.conversion.options import LayerOptions, shows
from lightning_lowprec.hardware import describe
from lightning_lowprec.masters.options import MasterOptions, WeightOptions
from lightning_lowprec.precision.compiled_blocks import Compile
from lightning_lowprec.precision.options import Base, HeadOptions, LossScaleOptions
from lightning_lowprec.precision.schedule import ScheduleOptions
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.one_format import WITHOUT, OneFormatChoices, OneFormatTorchAO, ProductsPerLayer


@final
@shows(
    *(LayerOptions, LossScaleOptions, MasterOptions, WeightOptions, HeadOptions, ScheduleOptions),
    without=WITHOUT,
)
class Int8TorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in int8, everything else under autocast; float32 weights unless told otherwise.

    Both operands of each GEMM get int8 codes with a scale per row (``torchao.prototype.quantized_training``). Stacked
    experts stay in the base dtype. FSDP2 gathers weights in the base dtype.

    Args:
        recipe: ``"int8"``, or recipes per layer: ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}``. The first
            pattern that matches an fqn wins; ``keep``, ``only`` and the built-in rules come before. A mapping of
            ``forward``, ``grad_input`` and ``grad_weight`` computes those GEMMs in the base dtype, the others in int8.
        base: dtype of every operation outside of int8: ``"bf16"``, or ``"fp16"`` with loss scaling.
        stochastic_rounding: round the codes of gradients stochastically, in both backward GEMMs: no bias, more noise.
            The random numbers are torch's, which no checkpoint of Lightning holds.
        int8_eval: whether validation, test and prediction run in int8 too.
        compile: ``"auto"`` compiles blocks in place on CUDA unless some are compiled already; True compiles them on any
            device, False never; a mapping gives ``torch.compile`` options. Blocks are the children, one or several of
            one class, of an ``nn.ModuleList`` that holds int8 layers.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: torchao is too old.
    """

    format: ClassVar[str] = "int8"
    kind: ClassVar[str] = "int8"
    name: ClassVar[str] = "int8-mixed"

    def __init__(
        self,
        recipe: Literal["int8"] | ProductsPerLayer = "int8",
        *,
        base: Base = "bf16",
        stochastic_rounding: bool = False,
        int8_eval: bool = True,
        compile: Compile = "auto",
        **options: Unpack[OneFormatChoices],
    ) -> None:
        self.stochastic_rounding = stochastic_rounding
        super().__init__(recipe, base=base, low_eval=int8_eval, compile=compile, options=options)

    @property
    @override
    def hardware_recipe(self) -> RecipeKey:
        """Triton's kernel, or ``torch._int_mm``."""
        return "int8"

    @override
    def refusal(self, device: torch.device) -> str | None:
        """No torchao, or one without the prototype."""
        return super().refusal(device) or prototype_refusal(self.kind)

    @override
    def how(self, device: torch.device) -> str:
        """The kernel."""
        if device.type == "cuda":
            return f"int8 GEMMs by torchao's Triton kernel on {describe(device)}"
        return f"int8 GEMMs by torch._int_mm on {describe(device)}: the codes of a GPU; slow"

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        """With or without stochastic rounding."""
        from lightning_lowprec.products.int8 import Int8

        return Int8(stochastic=self.stochastic_rounding)

    @override
    def sharded_identity(self) -> tuple[Any, ...]:
        """The layers, how they compute, and how gradients are rounded."""
        return *super().sharded_identity(), self.stochastic_rounding
