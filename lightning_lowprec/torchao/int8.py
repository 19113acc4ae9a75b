"""int8 mixed-precision training through torchao: products of int8 codes, which Ampere and consumer cards have too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, final

import torch
from typing_extensions import Unpack, override

from lightning_lowprec.checks import Rule, check_choice
from lightning_lowprec.conversion.gemms import GemmChoices
from lightning_lowprec.conversion.name_suffixes import of_options
from lightning_lowprec.conversion.options import LayerOptions, SelectionChoices, shows, take
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.hardware import describe
from lightning_lowprec.masters.options import MasterChoices, MasterOptions, WeightChoices, WeightOptions
from lightning_lowprec.precision.compiled_blocks import Compile
from lightning_lowprec.precision.options import Base, HeadChoices, HeadOptions, LossScaleChoices, LossScaleOptions
from lightning_lowprec.precision.schedule import ScheduleChoices, ScheduleOptions
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.plugin import TorchAO

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Recipes

WITHOUT: Final = ("min_gain", "tokens")
"""Options of other plugins that need measured gains, which there are not for these layers."""
ProductsPerLayer = Annotated[
    Mapping[str, Literal["int8", "mxfp8", "bf16"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]


class PrototypeChoices(
    SelectionChoices, LossScaleChoices, MasterChoices, WeightChoices, HeadChoices, ScheduleChoices, total=False
):
    """The options that these plugins share with others, for type checkers."""


class TorchAOPrototype(TorchAO):
    """Base of the plugins of torchao's prototypes, which have one format and no float8 for FSDP2 to gather."""

    kind: ClassVar[Literal["int8", "mxfp8"]]
    name: ClassVar[str]
    """The name for ``precision=``, without a suffix."""
    alignment: ClassVar[int] = 16
    """Features are multiples of this number."""

    def __init__(
        self, recipe: Any, *, base: Base, low_eval: bool, emulate: bool | None, compile: Compile, options: Any
    ) -> None:
        recipes: str | RecipeMap = recipe
        if isinstance(recipe, Mapping):
            recipes = RecipeMap.of(recipe, names=(self.kind,), base=self.kind)
        else:
            check_choice("recipe", recipe, (self.kind,))
        masters = take(MasterOptions, options).resolve(base)
        super().__init__(
            recipe, recipes, masters, base=base, low_eval=low_eval, emulate=emulate, compile=compile, options=options
        )
        stem = self.name if isinstance(recipes, str) else f"{self.name}-per-layer"
        self.precision = stem + of_options(base, None if masters is None else masters.config.form)

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        """The format; no gains are known of it."""
        recipe = self.recipes if isinstance(self.recipes, RecipeMap) else "tensorwise"
        return {"recipe": recipe, "alignment": self.alignment, "format": self.format}

    @override
    def refusal(self, device: torch.device) -> str | None:
        """No torchao, or one without the prototype."""
        return super().refusal(device) or prototype_refusal(self.kind)

    @override
    def gathers(self, options: Any) -> str | None:
        """FSDP2 gathers values: codes are made at every product, along other dimensions each time."""
        return f"`precision={self.precision!r}` encodes a weight along its rows and along its columns, in bf16"


@final
@shows(
    *(LayerOptions, LossScaleOptions, MasterOptions, WeightOptions, HeadOptions, ScheduleOptions),
    without=WITHOUT,
)
class Int8TorchAO(TorchAOPrototype):
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
    kind: ClassVar[Literal["int8", "mxfp8"]] = "int8"
    name: ClassVar[str] = "int8-mixed"

    def __init__(
        self,
        recipe: Literal["int8"] | ProductsPerLayer = "int8",
        *,
        base: Base = "bf16",
        stochastic_rounding: bool = False,
        int8_eval: bool = True,
        compile: Compile = "auto",
        **options: Unpack[PrototypeChoices],
    ) -> None:
        self.stochastic_rounding = stochastic_rounding
        super().__init__(recipe, base=base, low_eval=int8_eval, emulate=None, compile=compile, options=options)

    @property
    @override
    def hardware_recipe(self) -> RecipeKey:
        """Triton's kernel, or ``torch._int_mm``."""
        return "int8"

    @override
    def how(self, device: torch.device) -> str:
        """The kernel."""
        if device.type == "cuda":
            return f"int8 GEMMs by torchao's Triton kernel on {describe(device)}"
        return f"int8 GEMMs by torch._int_mm on {describe(device)}: the codes of a GPU; slow"

    @override
    def layer_recipes(self, device: torch.device) -> Recipes:
        """With or without stochastic rounding."""
        from lightning_lowprec.products.int8 import Int8
        from lightning_lowprec.torchao.settings import OneFormat

        return OneFormat(name=self.kind, arithmetic=Int8(stochastic=self.stochastic_rounding))

    @override
    def sharded_identity(self) -> tuple[Any, ...]:
        """The layers, how they compute, and how gradients are rounded."""
        return *super().sharded_identity(), self.stochastic_rounding
