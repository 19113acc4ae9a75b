"""Settings of FP8 layers: what a recipe means for torchao, and for one layer. Importing this module imports torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final, get_args

import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_linear import Float8Linear

from lightning_lowprec.conversion.gains import Recipe
from lightning_lowprec.conversion.gemms import NO_GEMM, InBF16
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.conversion.selection import FEATURE_ALIGNMENT
from lightning_lowprec.torchao.own_backward import ScaledInside


def linear_config(
    recipe: Recipe,
    *,
    fp8_format: Literal["hybrid", "e4m3"],
    emulate: bool,
    round_scales_to_power_of_2: bool | None,
    rowwise_backward: Literal["scaled_after", "scaled_inside"] = "scaled_after",
) -> Float8LinearConfig:
    """Return torchao's configuration of a recipe; the arguments are those of ``FP8TorchAO``."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    if recipe == "tensorwise" and fp8_format == "e4m3":
        # a fresh CastConfig: torchao writes the target dtype into the one it is given
        grad_output = CastConfig(target_dtype=e4m3_dtype)
        config = replace(
            config, cast_config_grad_output=grad_output, cast_config_grad_output_for_grad_weight=grad_output
        )
    if round_scales_to_power_of_2 is not None:
        config = replace(config, round_scales_to_power_of_2=round_scales_to_power_of_2)
    return ScaledInside.of(config) if rowwise_backward == "scaled_inside" else config


@final
@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Everything that makes one layer compute as the layer does.

    Args:
        config: torchao's configuration.
        saves_weight_codes: whether the backward reads the codes of the weight that the forward made.
        saves_codes: whether the codes of the input are kept for the backward, in place of the input.
        in_bf16: the products that the recipe computes in high precision.
        settings: the options by which other recipes for this layer are made; None: ``config`` is the user's.
    """

    config: Float8LinearConfig
    saves_weight_codes: bool = False
    saves_codes: bool = False
    in_bf16: InBF16 = NO_GEMM
    settings: Settings | None = None

    def attributes(self, in_features: int, out_features: int) -> dict[str, Any]:
        """Return the attributes of an ``FP8Layer`` with these settings; the codes of padded inputs are not shared."""
        padding = -in_features % FEATURE_ALIGNMENT, -out_features % FEATURE_ALIGNMENT
        with torch.device("meta"):  # the constructor derives from the configuration what the forward needs
            made = Float8Linear(1, 1, bias=False, config=self.config)  # type: ignore[no-untyped-call]
            plain = nn.Linear(1, 1, bias=False)
        return {
            **{name: value for name, value in vars(made).items() if name not in vars(plain)},
            "padding": padding,
            "saves_weight_codes": self.saves_weight_codes,
            "saves_codes": self.saves_codes and not any(padding),
            "own_gemms": self.in_bf16,
            "in_bf16": tuple(sorted(self.in_bf16)),
            "settings": self.settings,
        }


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a plugin that all its layers share; the arguments are those of ``FP8TorchAO``."""

    fp8_format: Literal["hybrid", "e4m3"]
    emulate: bool
    round_scales_to_power_of_2: bool | None = None
    rowwise_backward: Literal["scaled_after", "scaled_inside"] = "scaled_after"
    saves_weight_codes: bool = False
    saves_codes: bool = False

    def of(self, recipe: LayerRecipe) -> LayerSettings:
        """Return the settings of a layer with this recipe, whose name is one of torchao's."""
        assert recipe.name in get_args(Recipe)
        name = cast(Recipe, recipe.name)
        one_scale = name == "tensorwise"
        config = linear_config(
            name,
            fp8_format=self.fp8_format if one_scale else "e4m3",
            emulate=self.emulate,
            round_scales_to_power_of_2=self.round_scales_to_power_of_2,
            rowwise_backward="scaled_after" if one_scale else self.rowwise_backward,
        )
        return LayerSettings(
            config=config,
            saves_weight_codes=self.saves_weight_codes and one_scale,
            saves_codes=self.saves_codes and one_scale,
            in_bf16=recipe.in_bf16,
            settings=self,
        )

    @staticmethod
    def of_config(config: Float8LinearConfig) -> Callable[[str], LayerSettings]:
        """Return a function that gives every layer the user's configuration."""
        return lambda fqn: LayerSettings(config=config)
