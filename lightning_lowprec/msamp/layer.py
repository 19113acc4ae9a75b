"""A layer whose weight is kept as codes and whose three products run in FP8 (MS-AMP, arXiv 2310.18313).

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]    e4m3 x e4m3
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]    e5m2 x e4m3
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]    e5m2 x e4m3

Every tensor has one power-of-two scale, from its amax. FP8 kernels read the first operand row by row and the second
column by column, so the three products need the codes of input, weight and gradient in both layouts. On CUDA one kernel
computes the scale, and one kernel writes the codes in every layout that a product will read. (The layers of
:mod:`~lightning_lowprec.products.linear` write the second layout in a kernel of its own, when a product asks for it.)

Features that are no multiples of 16 are filled up with zeros for the kernels, as MS-AMP does: codes of input, weight
and gradient, and the rest of what the products return is cut off. Zeros change no scale and no value.

The gradient of a weight that is stored as [K, N] (``in_by_out``) is ``input.T @ grad_output``: [K, M] @ [M, N].

Between forward and backward a layer keeps the codes of the input, one byte per element, in the layout of the backward.
The gradient of the weight is a ``ScaledGradient``, also one byte per element.
"""

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.conversion import layer_runs
from lightning_lowprec.conversion.declared import PlainFirst, is_declared
from lightning_lowprec.masters.float32_values import keep, raw
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import best_values_of, move_
from lightning_lowprec.msamp.weight_state import encode, required_state_of
from lightning_lowprec.numerics.formats import E4M3, E5M2, Format, saturating_cast
from lightning_lowprec.numerics.fp8_matrices import padded, product
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT, cut, cut_rows, pad_rows
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.private.torch import are_transforms_active, is_tracing
from lightning_lowprec.products.transforms import KEEP, check_backward, check_call, refuse_forward_mode, refuse_layout


class ScaledLayer(PlainFirst):
    """A layer that does a Linear's work, after ``scale_linears``; its state dict is the plain layer's, in float32."""

    in_by_out: ClassVar[bool] = False
    """Whether the weight is stored as [K, N], instead of [N, K]."""
    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    emulate: Emulation
    """Multiply dequantised codes in float32, or as a named GPU, instead of running FP8 kernels."""
    fp8_eval: bool
    """Multiply in FP8 in evaluation without gradients too, instead of with the exact values of the weight."""
    float32_gradients: bool
    """Give the weight a float32 gradient, instead of a ScaledGradient."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype; without autocast, in the dtype of the input."""
        if not torch.compiler.is_compiling() and layer_runs.waiting:
            layer_runs.note_run(self)
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self._plain(input, self.weight)  # raises as the plain layer does
        if not (self.training or self.fp8_eval or torch.is_grad_enabled()):
            codes, scale = required_state_of(self.weight).for_products()
            return self._plain(input, (codes.float() / scale).to(input.dtype))
        if are_transforms_active() or torch.compiler.is_exporting() or is_tracing():
            check_call("ScaledLinear (MS-AMP)", KEEP)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        elif is_declared(self):
            return self.declared_forward(input)
        if input.layout is not torch.strided:
            refuse_layout(input, "ScaledLinear (MS-AMP)")
        tokens = input.numel() // self.in_features  # none are padded too, since kernels refuse K = 0
        fits = tokens % ALIGNMENT == 0 < tokens  # a slice of all rows would be copied in backward
        rows = input.reshape(-1, self.in_features) if fits else pad_rows(input, ALIGNMENT)
        options = self.emulate, self.float32_gradients, self.in_by_out
        output: Tensor = _Matmul.apply(rows, self.weight, *options)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], self.out_features) if fits else cut_rows(output, input)

    def _plain(self, input: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a weight that is no codes, as the layer did before it was converted."""
        return F.linear(input, weight.t() if self.in_by_out else weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = best_values_of(self.weight)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: object, **kwargs: object
    ) -> None:
        # assign=True is ignored: the parameter stays, and the values are encoded into it
        metadata = {key: value for key, value in local_metadata.items() if key != "assign_to_params_buffers"}
        state = required_state_of(self.weight)
        state.loading = True
        try:
            super()._load_from_state_dict(state_dict, prefix, metadata, *args, **kwargs)
            if raw(self.weight) is not None and prefix + "weight" in state_dict:
                keep(self.weight, state_dict[prefix + "weight"], on_host=True)
        finally:
            state.loading = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScaledLayer":
        """Move the codes to another device together with their scales; never change their dtype."""
        required_state_of(self.weight)  # raises where pruning has put another tensor in its place
        weight: Any = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters = {"weight": weight, **self._parameters}
        device = fn(torch.empty(0, dtype=torch.uint8, device=weight.device)).device
        if device != weight.device:
            move_(weight, device)
        return self


# ---- the products


@final
@torch.compiler.allow_in_graph
class _Matmul(torch.autograd.Function):
    """[M, K] @ [K, N] -> [M, N], for rows of any float and a weight of codes, [N, K], or [K, N] with ``in_by_out``.

    Compilers of graphs take the call as it is: autograd, not dynamo, finds the codes inside of the weight.
    """

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, emulate: Emulation, float32_gradient: bool, in_by_out: bool
    ) -> Tensor:
        state = required_state_of(weight)
        kept, kept_scale = state.for_products()
        features, stored = weight.shape[1 if in_by_out else 0], padded(kept)
        codes, columns, scale = _input_codes(padded(rows), True, ctx.needs_input_grad[1])
        if stored.dtype == E4M3.dtype:
            weight_codes, weight_scale = stored.contiguous(), kept_scale
            if in_by_out:
                weight_codes = _weight_again(stored, kept_scale, kept_scale, True)
        else:
            weight_codes, weight_scale = _weight_codes(stored, kept_scale, in_by_out)
        # the stored codes are saved, so autograd notices when a step changes them before this backward
        ctx.save_for_backward(columns, scale, kept, kept_scale, weight_scale)
        ctx.dtype, ctx.options = rows.dtype, (emulate, float32_gradient, in_by_out)
        second = weight_codes if in_by_out else weight_codes.t()
        output = _multiply(codes, second, scale, weight_scale, rows.dtype, emulate)
        return cut(output, rows.shape[0], features)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            check_backward("ScaledLinear (MS-AMP)")
        codes, scale, stored, stored_scale, weight_scale = ctx.saved_tensors
        to_input, to_weight, *_ = ctx.needs_input_grad
        emulate, float32_gradient, in_by_out = ctx.options
        rows, columns, grad_scale = _grad_codes(padded(grad_output), to_input, to_weight)
        grad_input = grad_weight = None
        if to_input:
            weight = _weight_again(padded(stored), stored_scale, weight_scale, not in_by_out)
            second = weight.t() if in_by_out else weight
            grad_input = _multiply(rows, second, grad_scale, weight_scale, ctx.dtype, emulate)
            grad_input = cut(grad_input, len(grad_input), stored.shape[0 if in_by_out else 1])
        if to_weight:
            input, grad = (codes, scale), (columns, grad_scale)
            (left, left_scale), (right, right_scale) = (input, grad) if in_by_out else (grad, input)
            grad_weight = _multiply(left.t(), right, left_scale, right_scale, torch.float32, emulate)
            grad_weight = cut(grad_weight, *stored.shape)
            if not float32_gradient:
                grad_weight = ScaledGradient.of(grad_weight)
        return grad_input, grad_weight, None, None, None


# codes: [rows, columns] any float -> codes row by row or None, the same codes column by column or None, scale


@compiled_on_cuda
def _input_codes(values: Tensor, rows: bool, columns: bool) -> tuple[Any, Any, Tensor]:
    return _both(values, E4M3, rows, columns)


@compiled_on_cuda
def _grad_codes(values: Tensor, rows: bool, columns: bool) -> tuple[Any, Any, Tensor]:
    return _both(values, E5M2, rows, columns)


def _both(values: Tensor, format: Format, rows: bool, columns: bool) -> tuple[object, object, Tensor]:
    codes, scale = encode(values.float(), format)
    return _laid_out(codes, False) if rows else None, _laid_out(codes, True) if columns else None, scale


@compiled_on_cuda
def _weight_codes(stored: Tensor, scale: Tensor, by_column: bool) -> tuple[Tensor, Tensor]:
    """Round float16 codes of a weight to e4m3 codes, and return the scale of the e4m3 codes."""
    codes, new_scale = encode(stored.float() / scale, E4M3)
    return _laid_out(codes, by_column), new_scale


@compiled_on_cuda
def _weight_again(stored: Tensor, stored_scale: Tensor, scale: Tensor, by_column: bool) -> Tensor:
    """Return the e4m3 codes of a weight for a ``scale`` that the forward has found."""
    codes = stored if stored.dtype == E4M3.dtype else saturating_cast(stored.float() / stored_scale * scale, E4M3)
    return _laid_out(codes, by_column)


def _laid_out(codes: Tensor, by_column: bool) -> Tensor:
    return codes.t().contiguous().t() if by_column else codes.contiguous()


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, emulate: Emulation) -> Tensor:
    """Multiply codes [m, k] @ codes [k, n], ``b`` column by column, and divide by their scales: -> [m, n]."""
    return product(a, b, (a_scale.reciprocal(), b_scale.reciprocal()), dtype, fast=False, emulate=emulate)
