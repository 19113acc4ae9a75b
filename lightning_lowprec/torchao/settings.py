"""What a recipe of torchao means for the products of one layer. Importing this module imports torchao."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torchao.float8 import CastConfig, Float8LinearConfig
from torchao.float8.config import Float8GemmConfig, ScalingGranularity, ScalingType, e4m3_dtype
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import LinearMMConfig

from lightning_lowprec.conversion.matmuls import Published
from lightning_lowprec.conversion.recipe_map import NO_GEMM, InBF16, LayerRecipe
from lightning_lowprec.numerics.fp8_matrices import FastAccum
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.products.arithmetic import Arithmetic, Coding, Products, Transposable, serves
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.torchao.backend import FP8Format
from lightning_lowprec.torchao.wire_format import TorchAOWire


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Everything that makes one layer compute as the layer does."""

    name: str
    """The recipe."""
    products: Products
    """How the recipe computes the three products."""
    in_bf16: InBF16 = NO_GEMM
    """The products that the user wants in high precision instead."""
    config: Float8LinearConfig | None = None
    """torchao's configuration of the same products; None: torchao's ``Float8Linear`` has no such format."""

    @property
    def mm_config(self) -> LinearMMConfig | None:
        """torchao's settings of the three kernels, if it has the format."""
        return None if self.config is None else example(self.config).linear_mm_config

    @property
    def codes_serve_both(self) -> bool:
        """Whether the two products of the recipe that read the weight read the same codes."""
        return serves(self.products.forward, self.products.grad_input, "weight")

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 may gather the weight; None: one set of codes does not serve both products."""
        forward = self.products.forward
        if not self.codes_serve_both or {"forward", "grad_input"} & self.in_bf16:
            return None
        if not isinstance(forward, Transposable) or (coding := forward.coding("weight")) is None:
            return None
        return TorchAOWire(forward, coding, self.mm_config, self.products.saves_weight)


@functools.cache
def example(config: Float8LinearConfig) -> Float8Linear:
    """Return a layer of torchao, whose constructor derives from the configuration what its own code needs."""
    with torch.device("meta"):
        return Float8Linear(1, 1, bias=False, config=config)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a plugin that all its layers share; the arguments are those of ``FP8TorchAO``."""

    emulate: Emulation
    fp8_format: FP8Format = "hybrid"
    round_scales_to_power_of_2: bool | None = None
    saves_weight_codes: bool = False
    fast_accum: FastAccum = "forward"
    arithmetics: Mapping[str, Arithmetic] = field(default_factory=dict, hash=False)
    """By recipe: the formats that torchao's configuration does not have."""

    def of(self, recipe: LayerRecipe) -> LayerSettings:
        """Return the settings of a layer."""
        if (by := self.arithmetics.get(recipe.name)) is not None:
            products = Products(forward=by, grad_input=by, grad_weight=by, saves_weight=True)
            return LayerSettings(name=recipe.name, products=products, in_bf16=recipe.in_bf16)
        name = cast(Published, recipe.name)
        one_scale = name == "tensorwise"
        config = replace(Float8LinearConfig.from_recipe_name(name), emulate=bool(self.emulate))
        if one_scale and self.fp8_format == "e4m3":
            gradients = CastConfig(target_dtype=e4m3_dtype)  # torchao writes the dtype into a CastConfig without one
            config = replace(
                config, cast_config_grad_output=gradients, cast_config_grad_output_for_grad_weight=gradients
            )
        if self.fast_accum != "forward":  # which is torchao's own choice
            gemm = Float8GemmConfig(use_fast_accum=self.fast_accum == "all")
            config = replace(config, gemm_config_output=gemm, gemm_config_grad_input=gemm, gemm_config_grad_weight=gemm)
        if self.round_scales_to_power_of_2 is not None:
            config = replace(config, round_scales_to_power_of_2=self.round_scales_to_power_of_2)
        products = replace(products_of(config, self.emulate), saves_weight=self.saves_weight_codes and one_scale)
        return LayerSettings(name=name, products=products, in_bf16=recipe.in_bf16, config=config)


def products_of(config: Float8LinearConfig, emulate: Emulation) -> Products:
    """Return the products of a layer with this configuration of torchao; ``emulate`` says more than its own."""

    def coding(choice: Any) -> Coding:
        by_row = choice.scaling_granularity is ScalingGranularity.AXISWISE
        return Coding(dtype=choice.target_dtype, by_row=by_row, power_of_2=config.round_scales_to_power_of_2)

    def product(kernel: Float8GemmConfig, input: Any, weight: Any, gradient: Any) -> Scaled | None:
        if ScalingType.DISABLED in {choice.scaling_type for choice in (input, weight, gradient)}:
            return None
        codings = {"input": coding(input), "weight": coding(weight), "gradient": coding(gradient)}
        return Scaled(**codings, emulate=emulate, fast=kernel.use_fast_accum)

    input, input_again = config.cast_config_input, config.cast_config_input_for_grad_weight
    gradient, gradient_again = config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight
    return Products(  # each product has two operands; the third role is filled with one of them
        forward=product(config.gemm_config_output, input, config.cast_config_weight, input),
        grad_input=product(config.gemm_config_grad_input, gradient, config.cast_config_weight_for_grad_input, gradient),
        grad_weight=product(config.gemm_config_grad_weight, input_again, input_again, gradient_again),
    )
