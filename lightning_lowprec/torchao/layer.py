"""A layer that does a Linear's work with three GEMMs in FP8 through torchao; scales are computed from each tensor.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

A weight that is stored the other way round, [K, N], takes part in the same three products, and its gradient is computed
in its own layout: ``input.T @ grad_output``, [K, M] @ [M, N] -> [K, N]. So no weight and no gradient is transposed in
high precision.

The kernels need inner dimensions that are multiples of 16. M, the number of tokens, is an inner dimension of
``grad_weight``: zero rows are appended to a batch and cut off again. Zero rows change no amax and add nothing to any
sum, so the result is that of the batch without them. The plan checks K and N, or with ``pad_inner_dim`` zeros are
appended to input and weight in the same way. (torchao's own ``pad_inner_dim`` pads the inner dimension of each product
alone. Each of K and N is an outer dimension of another product, where the kernels need multiples of 16 too.)

Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

from abc import abstractmethod
from types import SimpleNamespace
from typing import Any, ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import LinearMMConfig

from lightning_lowprec.conversion.gemms import GEMMS, Gemm, InBF16
from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.transforms import check_backward, check_call
from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.torchao import mixed_gemms, own_backward, saved_codes
from lightning_lowprec.torchao.coded import CodedMatmul
from lightning_lowprec.torchao.coded_input import check_coded_input
from lightning_lowprec.torchao.gathered_weight import GatheredWeight
from lightning_lowprec.torchao.own_backward import ScaledInside
from lightning_lowprec.torchao.settings import Settings
from lightning_lowprec.torchao.wire_format import TorchAOWire

TOKEN_ALIGNMENT: Final = 16
"""Tokens (product of all but the last dimension) that the kernels take are multiples of this."""
_WHOLE: Final = (Tensor, nn.Parameter)
"""The types of a weight that is whole, and in high precision: not cut by tensor parallelism."""


@final
@torch.compiler.allow_in_graph
class _Matmul(matmul_with_hp_or_float8_args):
    """torchao's matmul in FP8: [*, K] @ [K, N] -> [*, N], with a backward pass that has a gradient itself."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients in FP8, or in high precision where they will be differentiated."""
        if not torch.is_grad_enabled():
            if isinstance(ctx.config, ScaledInside) and not ctx.config.emulate:  # emulated products are scaled inside
                return own_backward.backward(ctx, grad_output)
            in_fp8: Any = matmul_with_hp_or_float8_args
            return in_fp8.backward(ctx, grad_output)  # type: ignore[no-any-return]
        return _in_high_precision(ctx, grad_output)


@final
@torch.compiler.allow_in_graph
class _MatmulWithoutBias(matmul_with_hp_or_float8_args):
    """:class:`_Matmul` whose output is that of the layer, and no view: a model may write to it, as Falcon does."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Multiply: [*, K] any float, [K, N], torchao's options -> [*, N]."""
        output: Tensor = matmul_with_hp_or_float8_args.forward(ctx, *args)
        return output.data

    backward = _Matmul.backward


@final
@torch.compiler.allow_in_graph
class _MatmulOfFreed(matmul_with_hp_or_float8_args):
    """:class:`_MatmulWithoutBias` for a weight whose memory is freed between forward and backward (ZeRO-3).

    torchao keeps a view of the weight for the backward, which would keep the memory of every gathered weight. Here the
    Parameter itself is kept. The backward reads the values that were gathered again for it.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, mm_config: LinearMMConfig, config: Any) -> Tensor:
        """Multiply: [*, K] any float, [N, K], torchao's options -> [*, N]."""
        output: Tensor = matmul_with_hp_or_float8_args.forward(ctx, input, weight.t(), mm_config, config)
        ctx.save_for_backward(input, weight)
        return output.data

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of input and weight, each in the dtype of ``grad_output``."""
        input, weight = ctx.saved_tensors
        kept = SimpleNamespace(
            saved_tensors=(input, weight.t()), config=ctx.config, linear_mm_config=ctx.linear_mm_config
        )
        grad_input, grad_weight_t, *_ = _Matmul.backward(kept, grad_output)
        assert grad_weight_t is not None
        return grad_input, grad_weight_t.t(), None, None


@final
@torch.compiler.allow_in_graph
class _MatmulInByOut(matmul_with_hp_or_float8_args):
    """:class:`_Matmul` for a weight that is stored as [K, N], whose gradient has the same layout."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients in FP8, or in high precision where they will be differentiated."""
        if torch.is_grad_enabled():
            return _in_high_precision(ctx, grad_output)
        return own_backward.backward(ctx, grad_output, in_by_out=True)


def _in_high_precision(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight_t = ctx.saved_tensors
    if isinstance(weight_t, GatheredWeight):
        check_backward("FP8Linear under FSDP2", "Use 'ddp'.")
    grad_output = grad_output.to(input.dtype)
    grad_input = grad_output @ weight_t.t().to(input.dtype)  # [*, N] @ [N, K] -> [*, K]
    rows, grad_rows = input.flatten(0, -2), grad_output.flatten(0, -2)
    return grad_input, (rows.t() @ grad_rows).to(weight_t.dtype), None, None  # [K, M] @ [M, N] -> [K, N]


class FP8Layer(PlainFirst):
    """A layer with FP8 GEMMs, for any batch, under autocast of any device: the work of a Linear."""

    in_by_out: ClassVar[bool]
    """Whether the weight is stored as [K, N], instead of [N, K]."""
    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    config: Float8LinearConfig
    linear_mm_config: LinearMMConfig
    fp8_eval: bool
    padding: tuple[int, int]
    """How many zeros are appended to K and N."""
    saves_weight_codes: bool
    """Whether the backward reads the codes of the weight that the forward made; False: each GEMM makes codes."""
    saves_codes: bool
    """Whether the codes of the input are kept for the backward, in place of the input."""
    weight_is_freed: bool
    """Whether the memory of the weight is freed between forward and backward (ZeRO-3)."""
    settings: Settings | None
    """The options by which other recipes for this layer are made; None: the layer has the user's config."""
    own_gemms: InBF16
    """The products that the recipe of the layer computes in high precision."""
    phase_gemms: InBF16
    """The products that the phase of a schedule computes in high precision."""
    in_bf16: tuple[Gemm, ...]
    """The products in high precision, of recipe and phase together."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self._plain(input)  # raises as nn.Linear does
        in_bf16 = self.in_bf16
        in_fp8 = (self.training or self.fp8_eval) and len(in_bf16) < len(GEMMS)
        if type(input) is not Tensor:
            check_coded_input(input, in_fp8=in_fp8, one_scale=self._has_one_scale)
        if not in_fp8 or input.numel() == 0:
            return self._plain(input)
        # eager inference mode shows torchao's tensors operations that they do not know (aten.to.dtype)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        given, device_type = input, input.device.type
        if torch.is_autocast_enabled(device_type):  # torchao asks for CUDA's autocast only
            input = input.to(torch.get_autocast_dtype(device_type))
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call(type(self).__name__)
        weight, bias = self.weight, self.bias
        if any(self.padding):
            input, weight, bias = self._padded(input)
        if in_bf16:
            output = mixed_gemms.matmul(self, given, input, weight, bias)
        else:
            output = self._in_fp8(given, input, weight, bias)
        if self.padding[1]:  # a copy and no view: a model may write to it
            output = output[..., : self.out_features].clone(memory_format=torch.contiguous_format)
        return output

    def _padded(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias with zeros behind K and N."""
        if isinstance(self.weight, DTensor):
            raise RuntimeError(
                "A layer whose features are padded does not run with tensor parallelism, which cuts the weight (got a"
                f" DTensor of shape {tuple(self.weight.shape)}). Leave `pad_inner_dim` out, or `keep=[...]` the layer."
            )
        k, n = self.padding
        weight = F.pad(self.weight, (0, n, 0, k) if self.in_by_out else (0, k, 0, n))
        return F.pad(input, (0, k)), weight, None if self.bias is None else F.pad(self.bias, (0, n))

    def _in_fp8(self, given: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[*, K] -> [*, N] with all three products in FP8; ``given`` is the input as the layer was given it."""
        fits = input.numel() // input.shape[-1] % TOKEN_ALIGNMENT == 0
        # with a scale per row torchao reshapes codes, which works for contiguous codes
        rows = input.contiguous() if fits else pad_rows(input, TOKEN_ALIGNMENT)
        keeps = self.saves_weight_codes and type(weight) in _WHOLE
        if self.saves_codes or keeps:
            output = self._with_own_codes(given, rows, weight, keeps)
        else:
            matmul: Any = _MatmulInByOut if self.in_by_out else _Matmul
            operand = weight if self.in_by_out else weight.t()
            if self.weight_is_freed and not self.in_by_out:
                matmul, operand = _MatmulOfFreed, weight
            elif bias is None and not self.in_by_out:
                matmul = _MatmulWithoutBias
            output = matmul.apply(rows, operand, self.linear_mm_config, self.config)
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output if fits else cut_rows(output, input)

    @abstractmethod
    def _plain(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted."""

    def _with_own_codes(self, given: Tensor, rows: Tensor, weight: Tensor, keeps: bool) -> Tensor:
        config = self.config
        gradients: Any = config.cast_config_grad_output.target_dtype
        power_of_2, emulate = config.round_scales_to_power_of_2, config.emulate
        if not self.saves_codes:
            output: Tensor = CodedMatmul.apply(  # type: ignore[no-untyped-call]
                rows, weight, gradients, power_of_2, emulate, self.in_by_out
            )
            return output
        return saved_codes.matmul(
            given,
            rows,
            weight,
            keep=keeps,
            gradients=gradients,
            power_of_2=power_of_2,
            emulate=emulate,
            in_by_out=self.in_by_out,
        )

    @property
    def reads_values(self) -> bool:
        """Whether a product that reads the weight runs in high precision: FSDP2 then gathers the values."""
        return "forward" in self.in_bf16 or "grad_input" in self.in_bf16 or not self._has_one_scale

    @property
    def _has_one_scale(self) -> bool:
        casts: tuple[Any, Any] = self.config.cast_config_weight, self.config.cast_config_weight_for_grad_input
        return all(cast.scaling_granularity is ScalingGranularity.TENSORWISE for cast in casts)

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 may gather the weight; None: the weight has a scale per row, or is padded."""
        if not self._has_one_scale or any(self.padding):
            return None
        dtype: Any = self.config.cast_config_weight.target_dtype
        return TorchAOWire(self.linear_mm_config, dtype, self.settings is not None and self.settings.saves_weight_codes)
