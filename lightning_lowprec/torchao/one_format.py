"""The base of the plugins whose layers have one format: the user chooses the layers, and products in high precision.

A format needs its arithmetic, a file in `products/`, and a class below this one; see "To add a format" in the docs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import torch
from typing_extensions import override

from lightning_lowprec.checks import Rule, check_choice
from lightning_lowprec.conversion.gemms import GemmChoices
from lightning_lowprec.conversion.name_suffixes import of_options
from lightning_lowprec.conversion.options import SelectionChoices, take
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.masters.options import MasterChoices, MasterOptions, WeightChoices
from lightning_lowprec.precision.compiled_blocks import Compile
from lightning_lowprec.precision.options import Base, HeadChoices, LossScaleChoices
from lightning_lowprec.precision.schedule import ScheduleChoices
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.torchao.plugin import TorchAO

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Recipes

WITHOUT: Final = ("min_gain", "tokens")
"""Options of other plugins that need measured gains, which there are not for these layers."""
ProductsPerLayer = Annotated[
    Mapping[str, Literal["int8", "mxfp8", "bf16"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]


class OneFormatChoices(
    SelectionChoices, LossScaleChoices, MasterChoices, WeightChoices, HeadChoices, ScheduleChoices, total=False
):
    """The options that these plugins share with others, for type checkers."""


class OneFormatTorchAO(TorchAO):
    """Base of the plugins of one format; FSDP2 gathers their weights in the base dtype."""

    kind: ClassVar[str]
    """The name of the recipe."""
    name: ClassVar[str]
    """The name for ``precision=``, without a suffix."""
    alignment: ClassVar[int] = 16
    """Features are multiples of this number."""

    def __init__(
        self,
        recipe: Any,
        *,
        options: Any,
        base: Base = "bf16",
        low_eval: bool = True,
        emulate: bool | None = None,
        compile: Compile = "auto",
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

    @abstractmethod
    def arithmetic(self, device: torch.device) -> Arithmetic:
        """Return the format; this may import torchao."""

    @override
    def layer_recipes(self, device: torch.device) -> Recipes:
        """The format, for every layer."""
        from lightning_lowprec.torchao.settings import OneFormat

        return OneFormat(name=self.kind, arithmetic=self.arithmetic(device))

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        """The format; no gains are known of it."""
        recipe = self.recipes if isinstance(self.recipes, RecipeMap) else "tensorwise"
        return {"recipe": recipe, "alignment": self.alignment, "format": self.format}

    @override
    def gathers(self, options: Any) -> str | None:
        """FSDP2 gathers values: codes are made at every product, along other dimensions each time."""
        return f"`precision={self.precision!r}` encodes a weight along its rows and along its columns, in bf16"
