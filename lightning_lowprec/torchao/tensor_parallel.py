"""Layers whose weight is cut by tensor parallelism (a DTensor): torchao's own function computes them.

torchao's ``Float8ColwiseParallel`` and its siblings also send activations between ranks as float8 codes with one scale,
whatever the recipe of the layer is. Importing this module imports torchao (about 3 s).
"""

from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.numerics.tensor_cores import UNITS
from lightning_lowprec.private.torch import local_tensor
from lightning_lowprec.products.coded_weight import CodedWeight
from lightning_lowprec.products.transforms import check_backward

STYLES = "`Float8ColwiseParallel`, `Float8RowwiseParallel` or `PrepareFloat8ModuleInput`"
_TOKENS = 16
CUT: Final = (DTensor, Float8TrainingTensor)
"""The classes of inputs that come from tensor parallelism."""


def linear_by_torchao(layer: Any, input: Tensor, weight_t: Tensor) -> Tensor:
    """[*, K] -> [*, N] in the dtype of ``input``, by a weight [K, N]; refuse what does not run if it is cut."""
    if (refusal := _refusal(layer)) is not None:
        raise RuntimeError(f"{refusal[0]} (got a DTensor of shape {tuple(layer.weight.shape)}). {refusal[1]}")
    fits = input.numel() // input.shape[-1] % _TOKENS == 0
    # with a scale per row torchao reshapes codes, which works for contiguous codes
    rows = input.contiguous() if fits else pad_rows(input, _TOKENS)
    output: Tensor = _Matmul.apply(rows, weight_t, layer.settings.mm_config, layer.settings.config)  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        output = output + layer.bias.to(output.dtype)
    return output if fits else cut_rows(output, input)


def _refusal(layer: Any) -> tuple[str, str] | None:
    cut = "does not run with tensor parallelism, which cuts the weight"
    if layer.values_dtype is not None:
        return f"A frozen weight that is stored as codes {cut}", "Use `frozen='convert'`."
    if layer.settings.config is None:
        return f"{type(layer).__name__} {cut}", "Use 'fp8-hybrid', or keep what is cut (`keep=[...]`)."
    if by_name := {getattr(by, "emulate", None) for by in vars(layer.settings.products).values()} & UNITS.keys():
        return f"`emulate={by_name.pop()!r}` {cut}", "Use `emulate=True`."
    if layer.is_padded:
        return f"A layer whose features are padded {cut}", "Leave `pad_inner_dim` out, or `keep=[...]` the layer."
    if layer.settings.in_bf16:
        return f"A layer with some GEMMs in bf16 {cut}", "Choose all GEMMs: 'bf16', or the recipe without `gemms`."
    return None


@final
@torch.compiler.allow_in_graph
class _Matmul(matmul_with_hp_or_float8_args):
    """torchao's matmul in FP8: [*, K] @ [K, N] -> [*, N], with a backward pass that has a gradient itself."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        output: Tensor = matmul_with_hp_or_float8_args.forward(ctx, *args)
        return output.data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return matmul_with_hp_or_float8_args.backward(ctx, grad_output)  # type: ignore[no-any-return,no-untyped-call]
        input, weight_t = ctx.saved_tensors
        if isinstance(weight_t, CodedWeight):
            check_backward("FP8Linear under FSDP2", "Use 'ddp'.")
        grad_output = grad_output.to(input.dtype)
        grad_input = grad_output @ weight_t.t().to(input.dtype)  # [*, N] @ [N, K] -> [*, K]
        rows, grad_rows = input.flatten(0, -2), grad_output.flatten(0, -2)
        return grad_input, (rows.t() @ grad_rows).to(weight_t.dtype), None, None  # [K, M] @ [M, N] -> [K, N]


def check_coded_input(input: Tensor, *, in_fp8: bool, one_scale: bool) -> None:
    """Raise RuntimeError if ``input`` is codes, and the layer does not multiply codes with one scale (now)."""
    if not isinstance(local_tensor(input), Float8TrainingTensor) or (in_fp8 and one_scale):
        return
    got = f"An FP8 layer got an input of shape {tuple(input.shape)} that is float8 codes with one scale"
    if not in_fp8:
        raise RuntimeError(
            f"{got}, and computes in high precision now. Use `FP8TorchAO(fp8_eval=True)`, or torch's own"
            f" styles in place of {STYLES}."
        )
    raise RuntimeError(
        f"{got}, and the recipe of the layer has a scale per row. Use `FP8TorchAO(recipe='tensorwise')`, or torch's"
        f" `ColwiseParallel`, `RowwiseParallel` or `PrepareModuleInput` in place of {STYLES}."
    )
