"""torchao's backward pass, for what torchao's own function does not do.

    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

For a weight that is stored as [K, N] the second product is ``input.T @ grad_output``, so that the gradient has the
layout of the weight; torchao's gradient would be transposed, 8 bytes per weight more.

For rowwise recipes, kernels can apply the scales of rows and columns themselves (:class:`ScaledInside`). torchao
multiplies the codes without scales, rounds the product to bf16, and scales and rounds it again, because the CUTLASS
kernel for such scales is slow where it accumulates exactly. cuBLASLt's kernel (Hopper and later) takes scales per row
and column with exact accumulation: the product is scaled before it is rounded once. The codes are the same, and with
scales that are powers of two, the recipes' own choice, so is the result: multiplying by them rounds nothing.
Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, final

import torch
from torch import Tensor
from torchao.float8 import CastConfig, Float8LinearConfig
from torchao.float8.config import ScalingType
from torchao.float8.float8_ops import preprocess_addmm
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from lightning_lowprec.private.torch_products import scaled_product


@final
@dataclass(frozen=True)
class ScaledInside(Float8LinearConfig):
    """torchao's configuration, whose backward products are scaled by the kernel."""

    @classmethod
    def of(cls, config: Float8LinearConfig) -> ScaledInside:
        """Return a configuration with the values of ``config``."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})


def backward(ctx: Any, grad_output: Tensor, *, in_by_out: bool = False) -> tuple[Tensor | None, ...]:
    """Return the gradients of torchao's ``matmul_with_hp_or_float8_args``: [*, N] -> [*, K], [K, N].

    Args:
        ctx: of torchao's function, which has saved the input [*, K] and the transposed weight [K, N].
        grad_output: [*, N]; rowwise products of other dtypes than bf16 are rounded to bf16 on their way out, as torchao
            does.
        in_by_out: whether the gradient [K, N] is contiguous; else its transpose is.
    """
    input, weight_t = ctx.saved_tensors
    config = ctx.config
    scaled_inside = isinstance(config, ScaledInside) and not config.emulate  # emulated products are scaled inside
    product = product_scaled_inside if scaled_inside else torch.mm
    rows, grad_rows = input.reshape(-1, input.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])

    def cast(tensor: Tensor, choice: CastConfig, role: GemmInputRole, dim: int) -> Tensor:
        if choice.scaling_type is ScalingType.DISABLED or isinstance(tensor, Float8TrainingTensor):
            return tensor
        cast_by_torchao: Any = hp_tensor_to_float8_dynamic
        codes: Tensor = cast_by_torchao(
            tensor,
            choice.target_dtype,
            ctx.linear_mm_config,
            gemm_input_role=role,
            scaling_granularity=choice.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, choice.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        return codes

    grad_input = product(
        cast(grad_rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1),
        cast(weight_t, config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1).t(),
    )
    # torchao finds the options of a product by the roles of its operands: the first is called the gradient
    roles = GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT
    of_grad, of_input = roles[::-1] if in_by_out else roles
    grad_codes = cast(grad_rows, config.cast_config_grad_output_for_grad_weight, of_grad, 0)
    input_codes = cast(rows, config.cast_config_input_for_grad_weight, of_input, 0)
    transposed = input_codes.t() if in_by_out else grad_codes.t()
    grad_weight = product(transposed, grad_codes if in_by_out else input_codes)  # [K, N], or its transpose
    grad_weight = grad_weight if in_by_out else grad_weight.t()
    return grad_input.reshape(*grad_output.shape[:-1], grad_input.shape[-1]), grad_weight, None, None


def product_scaled_inside(a: Any, b: Any) -> Tensor:
    """[M, K] @ [K, N] -> [M, N] in the dtype that ``a`` was cast from; of codes, or in high precision."""
    if not isinstance(a, Float8TrainingTensor):
        in_high_precision: Tensor = a @ b
        return in_high_precision
    product_of: Any = preprocess_addmm
    codes_a, scale_a, codes_b, scale_b = product_of(a, b)
    return scaled_product(codes_a, codes_b, scale_a.reciprocal(), scale_b.reciprocal()).to(a.dtype)
