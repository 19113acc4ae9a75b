"""MXFP8 training through torchao: a power-of-two scale per 32 values, without Transformer Engine."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from typing_extensions import Unpack, override

from lightning_lowprec.conversion.options import LayerOptions, shows, take
from lightning_lowprec.masters.options import MasterOptions, WeightOptions
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.compiled_blocks import Compile
from lightning_lowprec.precision.options import EmulationChoices, FP8Options, HeadOptions, LossScaleOptions
from lightning_lowprec.precision.schedule import ScheduleOptions
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.one_format import WITHOUT, OneFormatChoices, OneFormatTorchAO, ProductsPerLayer


class MXFP8Choices(OneFormatChoices, EmulationChoices, total=False):
    """The options of :class:`MXFP8TorchAO` that other plugins share, for type checkers."""

    fp8_eval: bool


@final
@shows(
    *(LayerOptions, FP8Options, LossScaleOptions, MasterOptions, WeightOptions, HeadOptions, ScheduleOptions),
    without=(*WITHOUT, "base"),
)
class MXFP8TorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in MXFP8, everything else in bf16; float32 weights unless told otherwise.

    Codes are e4m3 with a power-of-two scale per 32 values, rounded up, as in torchao's ``MXFP8Linear``. Kernels run on
    Blackwell; elsewhere MXFP8 can be emulated. Features are multiples of 32. Stacked experts stay in bf16. FSDP2
    gathers weights in bf16.

    Args:
        recipe: ``"mxfp8"``, or recipes per layer: ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}``. The first
            pattern that matches an fqn wins; ``keep``, ``only`` and the built-in rules come before. A mapping of
            ``forward``, ``grad_input`` and ``grad_weight`` computes those GEMMs in bf16, the others in MXFP8.
        compile: ``"auto"`` compiles blocks in place on CUDA unless some are compiled already; True compiles them on any
            device, False never; a mapping gives ``torch.compile`` options. Blocks are the children, one or several of
            one class, of an ``nn.ModuleList`` that holds MXFP8 layers.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: torchao is too old, or the device has no MXFP8 and ``emulate`` is not set.
    """

    format: ClassVar[str] = "MXFP8"
    kind: ClassVar[str] = "mxfp8"
    name: ClassVar[str] = "mxfp8-torchao"
    alignment: ClassVar[int] = 32

    def __init__(
        self,
        recipe: Literal["mxfp8"] | ProductsPerLayer = "mxfp8",
        *,
        compile: Compile = "auto",
        **options: Unpack[MXFP8Choices],
    ) -> None:
        running = take(FP8Options, options)
        super().__init__(
            recipe,
            base="bf16",
            low_eval=running.fp8_eval,
            emulate=running.emulate,
            compile=compile,
            options=options,
        )

    @property
    @override
    def hardware_recipe(self) -> RecipeKey:
        """torchao's kernels, made for Blackwell."""
        return "torchao-mxfp8"

    @override
    def emulates(self, device: torch.device) -> bool:
        """On CPU unless the user says no; on a GPU only if the user says so."""
        return fp8.emulates(self.emulate, device)

    @override
    def refusal(self, device: torch.device) -> str | None:
        """No torchao, one without the prototype, or a device without MXFP8 that does not emulate."""
        if (missing := super().refusal(device) or prototype_refusal(self.kind)) is not None:
            return missing
        if device.type == "cpu" and not self.emulates(device):
            return "cpu has no MXFP8 kernels. Leave `emulate=False` out"
        return fp8.kernel_refusal("torchao-mxfp8", self.emulate, device, "MXFP8TorchAO(emulate=True)")

    @override
    def how(self, device: torch.device) -> str:
        """Kernels, or emulated."""
        return fp8.how(self.emulate, device)

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        """Kernels, or emulated."""
        from lightning_lowprec.products.mxfp8 import MXFP8

        return MXFP8(emulate=self.emulates(device))
