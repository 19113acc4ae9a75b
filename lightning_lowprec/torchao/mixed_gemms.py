"""A layer that computes one or two of its three GEMMs in high precision, and the others by its FP8 recipe.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

A GEMM in high precision gets what autocast would give it: operands in the autocast dtype, the bias within the GEMM. Its
result is that of ``bf16-mixed``, bit for bit. A GEMM in FP8 gets the codes of the recipe, bit for bit, with kept codes
of the input where the layer keeps them.

Under FSDP2 a weight that a GEMM in high precision reads is gathered in high precision. FP8 then rounds it once more.
"""

from __future__ import annotations

from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.float8 import CastConfig, Float8LinearConfig
from torchao.float8.config import ScalingType
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

from lightning_lowprec.conversion.gemms import Gemm
from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.torchao import own_backward, saved_codes
from lightning_lowprec.torchao.own_backward import ScaledInside

_ALIGNMENT = 16  # of rows: the kernels' inner dimension in the GEMM of the weight gradient


def matmul(layer: Any, given: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[*, K] -> [*, N] in the dtype of ``input``, with the bias.

    Args:
        layer: an ``FP8Layer``: which products run in high precision, and the recipe of the others.
        given: the tensor that the layer was called with: layers that are called with one tensor share its codes.
        input: ``given`` in the autocast dtype, perhaps padded.
        weight: the weight of the layer, perhaps padded.
        bias: the bias of the layer, perhaps padded.

    Raises:
        RuntimeError: the weight is cut by tensor parallelism.
    """
    if isinstance(weight, DTensor):
        raise RuntimeError(
            "A layer with some GEMMs in bf16 does not run with tensor parallelism, which cuts the weight (got a DTensor"
            f" of shape {tuple(weight.shape)}). Choose all GEMMs: 'bf16', or the recipe without `gemms`."
        )
    gemms = layer.in_bf16
    of_input: tuple[Any, ...] = (None, None)
    if layer.saves_codes and "grad_weight" not in gemms:
        of_input = saved_codes.input_codes(given, _padded(input), layer.config.round_scales_to_power_of_2)
    output: Tensor = _MixedMatmul.apply(  # type: ignore[no-untyped-call]
        input,
        weight,
        bias,
        *of_input,
        gemms,
        layer.linear_mm_config,
        layer.config,
        layer.in_by_out,
    )
    return output


def _padded(rows: Tensor) -> Tensor:
    fits = rows.numel() // rows.shape[-1] % _ALIGNMENT == 0
    return rows if fits else pad_rows(rows, _ALIGNMENT)


def _in_high_precision(input: Tensor, weight: Tensor, bias: Tensor | None, in_by_out: bool) -> Tensor:
    """[*, K] -> [*, N], as a Linear computes it, or a Conv1D with ``in_by_out``."""
    if not in_by_out:
        return F.linear(input, weight, bias)
    x = input.reshape(-1, input.shape[-1])
    output = x @ weight if bias is None else torch.addmm(bias, x, weight)
    return output.view(*input.shape[:-1], output.shape[-1])


@final
@torch.compiler.allow_in_graph
class _MixedMatmul(torch.autograd.Function):
    """[*, K] -> [*, N] in the dtype of the input, with the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_codes: Tensor | None,
        input_scale: Tensor | None,
        gemms: tuple[Gemm, ...],
        mm_config: LinearMMConfig,
        config: Float8LinearConfig,
        in_by_out: bool,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            input: [*, K] in the autocast dtype.
            weight: [N, K], or [K, N] with ``in_by_out``; float, or gathered by FSDP2 as float8.
            bias: [N] float.
            input_codes: of the padded input, [M, K]; None: the input is kept.
            input_scale: [] float32, of these codes.
            gemms: the products in high precision.
            mm_config: torchao's settings of the products in FP8.
            config: torchao's casts of the products in FP8.
            in_by_out: the layout of the weight and of its gradient.
        """
        ctx.gemms, ctx.casts, ctx.in_by_out = gemms, _Casts(mm_config, config, input.dtype), in_by_out
        ctx.has_bias = bias is not None
        kept_input = input if input_codes is None else None
        ctx.save_for_backward(kept_input, input_codes, input_scale, weight)
        bias = None if bias is None else bias.to(input.dtype)
        if "forward" in gemms:
            return _in_high_precision(input, weight.to(input.dtype), bias, in_by_out).data
        casts, role = ctx.casts, GemmInputRole
        padded = _padded(input)
        x = padded.reshape(-1, padded.shape[-1])
        weight_t = weight if in_by_out else weight.t()
        product = torch.mm(
            casts.of(x, config.cast_config_input, role.INPUT, -1),
            casts.of(weight_t, config.cast_config_weight, role.WEIGHT, 0),
        )
        output = product.reshape(*padded.shape[:-1], product.shape[-1])
        output = output if bias is None else output + bias
        output = output if padded is input else cut_rows(output, input)
        return output.data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias, each in the dtype of ``grad_output``.

        Raises:
            RuntimeError: the gradients will be differentiated, and the codes of the input were kept.
        """
        input, codes, scale, weight = ctx.saved_tensors
        casts: _Casts = ctx.casts
        if torch.is_grad_enabled():
            saved_codes.check_values_are_kept(input)
            gemms: tuple[Gemm, ...] = ("grad_input", "grad_weight")
        else:
            gemms = ctx.gemms
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        g = grad_output.reshape(-1, grad_output.shape[-1])
        as_rows = weight.t() if ctx.in_by_out else weight  # [N, K]
        if needs_input:
            if "grad_input" in gemms:
                grad_input = g @ as_rows.to(casts.dtype)
            else:
                grad_input = casts.grad_input(_padded(g), as_rows)[: g.shape[0]]
            grad_input = grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1])
        if needs_weight:
            x = None if input is None else input.reshape(-1, input.shape[-1])
            if "grad_weight" in gemms:
                assert x is not None
                grad_weight = x.t() @ g if ctx.in_by_out else g.t() @ x
            else:
                grad_weight = casts.grad_weight(_padded(g), x, codes, scale, in_by_out=ctx.in_by_out)
        if needs_bias and ctx.has_bias:
            grad_bias = g.sum(0)
        return grad_input, grad_weight, grad_bias, *(None,) * 6


@final
class _Casts:
    """torchao's casts of the operands of products in FP8."""

    def __init__(self, mm_config: LinearMMConfig, config: Float8LinearConfig, dtype: torch.dtype) -> None:
        self.mm_config, self.config, self.dtype = mm_config, config, dtype

    def of(self, tensor: Tensor, cast_config: CastConfig | None, role: GemmInputRole, dim: int) -> Tensor:
        """Cast, unless ``tensor`` is float8 already, or the recipe computes the product in high precision."""
        if isinstance(tensor, Float8TrainingTensor):
            return tensor
        assert cast_config is not None  # torchao's constructor has replaced None
        if cast_config.scaling_type is ScalingType.DISABLED:
            return tensor.to(self.dtype)
        by_torchao: Any = hp_tensor_to_float8_dynamic
        codes: Tensor = by_torchao(
            tensor,
            cast_config.target_dtype,
            self.mm_config,
            gemm_input_role=role,
            scaling_granularity=cast_config.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast_config.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return codes

    def wrap(self, codes: Tensor, scale: Tensor | None, role: GemmInputRole) -> Tensor:
        """Return codes that exist already as torchao's tensor."""
        made: Any = Float8TrainingTensor
        return cast(Tensor, made(codes, scale, self.dtype, self.mm_config, gemm_input_role=role))

    def grad_input(self, g: Tensor, weight: Tensor) -> Tensor:
        """[M, N] @ [N, K] -> [M, K]."""
        a = self.of(g, self.config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1)
        b = self.of(weight.t(), self.config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1)
        return self._product(a, b.t())

    def grad_weight(
        self, g: Tensor, x: Tensor | None, codes: Tensor | None, scale: Tensor | None, *, in_by_out: bool
    ) -> Tensor:
        """[M, N], [M, K] -> [N, K], or [K, N] with ``in_by_out``; ``codes``, with their scale, stand for ``x``."""
        # torchao finds the options of a product by the roles of its operands: the first is called the gradient
        roles = GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT
        of_grad, of_input = roles[::-1] if in_by_out else roles
        a = self.of(g, self.config.cast_config_grad_output_for_grad_weight, of_grad, 0)
        if codes is not None:
            b = self.wrap(codes.t().contiguous().t(), scale, of_input)
        else:
            assert x is not None
            b = self.of(_padded(x), self.config.cast_config_input_for_grad_weight, of_input, 0)
        return self._product(b.t(), a) if in_by_out else self._product(a.t(), b)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if isinstance(self.config, ScaledInside) and not self.config.emulate:
            return own_backward.product_scaled_inside(a, b)
        return torch.mm(a, b)
