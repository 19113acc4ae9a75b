"""The plugins whose layers have one format: the user chooses the layers, and products in high precision.

A format needs its arithmetic, a file in `products/`, and a class below this base; see "To add a format" in the docs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

import torch
from typing_extensions import Unpack, override

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.options import shows
from lightning_lowprec.conversion.recipe_map import GemmChoices, RecipeMap
from lightning_lowprec.hardware import describe
from lightning_lowprec.precision import fp8
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.plugin import EXPERTS_IN_BF16, SHARED, Experts, SharedChoices, TorchAO

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Recipes

ProductsPerLayer = Annotated[
    Mapping[str, Literal["block", "int8", "mxfp8", "bf16"] | GemmChoices],
    Rule("a mapping of patterns of fqns to recipes"),
]


class OneFormatTorchAO(TorchAO):
    """Base of the plugins of one format."""

    kind: ClassVar[str]
    """The name of the recipe."""
    name: ClassVar[str]
    """The name for ``precision=``, without a suffix."""
    alignment: ClassVar[int] = 16
    """Features are multiples of this number."""
    one_code: bool = False
    """Whether forward and backward read the same codes of a weight."""

    def __init__(self, recipe: Any, options: Any) -> None:
        super().__init__(recipe, (self.kind,), options)
        self.precision = self.name + ("" if isinstance(recipe, str) else "-per-layer") + self.suffix

    @abstractmethod
    def arithmetic(self, device: torch.device) -> Arithmetic:
        """Return the format; this may import torchao."""

    @override
    def layer_recipes(self, device: torch.device) -> Recipes:
        from lightning_lowprec.torchao.settings import OneFormat

        return OneFormat(name=self.kind, arithmetic=self.arithmetic(device))

    @override
    def refusal(self, device: torch.device) -> str | None:
        return super().refusal(device) or prototype_refusal(self.kind)

    def refusal_of_kernels(self, device: torch.device) -> str | None:
        """Return why a format that can be emulated does not run; None if it does."""
        if device.type == "cpu" and not self.emulates(device):
            return f"cpu has no {self.format} kernels. Leave `emulate=False` out"
        assert self.hardware_recipe is not None
        constructor = f"{type(self).__name__}(emulate=True)"
        return fp8.kernel_refusal(self.hardware_recipe, self.emulate, device, constructor)

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        recipe = self.recipes if isinstance(self.recipes, RecipeMap) else "tensorwise"
        return {"recipe": recipe, "alignment": self.alignment, "format": self.format}

    @override
    def gathers(self, options: Any) -> str | None:
        """FSDP2 gathers codes that serve all products of a weight, else values."""
        if not self.one_code:
            return f"`precision={self.precision!r}` encodes a weight for the forward and once more for the backward"
        return None if self.fp8_eval else "`fp8_eval=False` evaluates with the weights in high precision"


@final
@shows(*SHARED, without=("emulate",))
class Int8TorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in int8, everything else under autocast; float32 weights unless told otherwise.

    Both operands of each GEMM get int8 codes with a scale per row (``torchao.prototype.quantized_training``). Stacked
    experts stay in the base dtype. FSDP2 gathers weights in the base dtype.

    Args:
        recipe: ``"int8"``, or recipes per layer as in :class:`~lightning_lowprec.FP8TorchAO`:
            ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}`` computes one of the GEMMs in high precision.
        stochastic_rounding: round the codes of gradients stochastically, in both backward GEMMs: no bias, more noise.
            The random numbers are torch's, which no checkpoint of Lightning holds.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: torchao is too old.
    """

    hardware_recipe: RecipeKey | None = "int8"
    format: ClassVar[str] = "int8"
    kind: ClassVar[str] = "int8"
    name: ClassVar[str] = "int8-mixed"
    own = ("stochastic_rounding",)

    def __init__(
        self,
        recipe: Literal["int8"] | ProductsPerLayer = "int8",
        *,
        stochastic_rounding: bool = False,
        **options: Unpack[SharedChoices],
    ) -> None:
        self.stochastic_rounding = stochastic_rounding
        super().__init__(recipe, options)
        self.emulate = False  # torch has the products of int8 on CPU

    @override
    def how(self, device: torch.device) -> str:
        if device.type == "cuda":
            return f"int8 GEMMs by torchao's Triton kernel on {describe(device)}"
        return f"int8 GEMMs by torch._int_mm on {describe(device)}: the codes of a GPU; slow"

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        from lightning_lowprec.products.int8 import Int8

        return Int8(stochastic=self.stochastic_rounding)


@final
@shows(*SHARED, without=("base",))
class BlockTorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in FP8 with a scale per block, as DeepSeek-V3 trained; everything else in bf16.

    Codes are e4m3, with a scale per 128 values of inputs and gradients, and per 128 x 128 of weights. Sums of 128
    products are scaled and added up in float32. On Hopper cuBLASLt multiplies (CUDA 12.9), on other GPUs torchao's
    Triton kernels; on a CPU it is emulated. FSDP2 gathers the codes.

    Args:
        recipe: ``"block"``, or recipes per layer as in :class:`~lightning_lowprec.FP8TorchAO`:
            ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}`` computes one of the GEMMs in high precision.
        experts: the stacked experts of mixtures. ``"auto"`` and ``"fp8"``: each computes as a Linear with its weight
            does, a product per expert. On a GPU the host waits, once per call of the experts, to learn how many rows
            each has. ``"bf16"`` keeps experts in bf16.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    hardware_recipe: RecipeKey | None = "torchao-block"
    kind: ClassVar[str] = "block"
    one_code = True
    name: ClassVar[str] = "fp8-block"
    own = ("experts",)

    def __init__(
        self,
        recipe: Literal["block"] | ProductsPerLayer = "block",
        *,
        experts: Experts = "auto",
        **options: Unpack[SharedChoices],
    ) -> None:
        self.experts: Experts = experts
        super().__init__(recipe, options)

    @override
    def refusal(self, device: torch.device) -> str | None:
        from lightning_lowprec.products.block import by_cublas

        refused = super().refusal(device) or self.refusal_of_kernels(device)
        by_triton = not self.emulates(device) and not by_cublas(device)
        return refused or (prototype_refusal("block-triton") if by_triton else None)

    @override
    def how(self, device: torch.device) -> str:
        from lightning_lowprec.products.block import by_cublas

        if self.emulates(device):
            return super().how(device)
        kernels = "cuBLASLt" if by_cublas(device) else "torchao's Triton kernels"
        return f"FP8 GEMMs with a scale per block by {kernels} on {describe(device)}"

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        return {**super().plan_options(device), "experts": EXPERTS_IN_BF16 if self.experts == "bf16" else None}

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        from lightning_lowprec.products.block import Block

        return Block(emulate=self.emulates(device))


@final
@shows(*SHARED, without=("base",))
class MXFP8TorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in MXFP8, everything else in bf16; float32 weights unless told otherwise.

    Codes are e4m3 with a power-of-two scale per 32 values, of weights per 32 x 32, rounded up. Forward and backward
    read the same codes of a weight, and FSDP2 gathers them. Kernels run on Blackwell; elsewhere MXFP8 can be emulated.
    Features are multiples of 32. Stacked experts stay in bf16.

    Args:
        recipe: ``"mxfp8"``, or recipes per layer as in :class:`~lightning_lowprec.FP8TorchAO`:
            ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}`` computes one of the GEMMs in high precision.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: torchao is too old, or the device has no MXFP8 and ``emulate`` is not set.
    """

    hardware_recipe: RecipeKey | None = "torchao-mxfp8"
    format: ClassVar[str] = "MXFP8"
    kind: ClassVar[str] = "mxfp8"
    name: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = 32
    one_code = True

    def __init__(self, recipe: Literal["mxfp8"] | ProductsPerLayer = "mxfp8", **options: Unpack[SharedChoices]) -> None:
        super().__init__(recipe, options)

    @override
    def refusal(self, device: torch.device) -> str | None:
        return super().refusal(device) or self.refusal_of_kernels(device)

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        from lightning_lowprec.products.mxfp8 import MXFP8

        return MXFP8(emulate=self.emulates(device))
