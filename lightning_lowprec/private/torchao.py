"""Private names of torchao that this package uses. torchao is imported inside the functions."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.extras import missing

_TENSOR: Final = "torchao.float8.float8_training_tensor.Float8TrainingTensor"
_ARGUMENTS: Final = ("_data", "_scale", "_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_axiswise_dim")
_INT8: Final = "torchao.prototype.quantized_training"
_MX: Final = "torchao.prototype.mx_formats"
_BLOCK: Final = "torchao.prototype.blockwise_fp8_training.kernels"
_PROTOTYPES: Final = {
    "block-triton": ("0.18", (f"{_BLOCK}.triton_fp8_gemm_1x128_128x128", f"{_BLOCK}.triton_fp8_gemm_1x128_128x1")),
    "int8": ("0.13", (f"{_INT8}.int8.quantize_int8_rowwise", f"{_INT8}.int8_mixed_precision.scaled_int8_mm")),
    "mxfp8": (
        "0.18",
        (
            f"{_MX}.mx_tensor.MXTensor.to_mx",
            f"{_MX}.utils._to_mxfp8_dim1_kernel_wrapper",
            f"{_MX}.config.MXFP8Dim0CastKernelChoice.TRITON",
            f"{_MX}.config.MXFP8Dim1CastKernelChoice.CUDA",
            f"{_MX}.config.ScaleCalculationMode.RCEIL",
            f"{_MX}.config.KernelPreference.EMULATED",
        ),
    ),
}
"""For each prototype, the first version that has been run with this package, and its names."""


def moved() -> list[str]:
    """Return the private names that the installed torchao no longer has; [] without torchao."""
    return [] if find_spec("torchao") is None else missing([f"{_TENSOR}.{name}" for name in _ARGUMENTS])


def constructor_arguments(tensor: object) -> tuple[Any, ...]:
    """Return the arguments that make an equal ``Float8TrainingTensor`` of the same memory."""
    return tuple(getattr(tensor, name) for name in _ARGUMENTS)


def codes_of(tensor: Any) -> tuple[Tensor, Tensor]:
    """Return the codes of a ``Float8TrainingTensor``, and their scale."""
    return tensor._data, tensor._scale


def set_scale(tensor: Any, scale: Tensor) -> None:
    """Give a ``Float8TrainingTensor`` another scale, in place."""
    tensor._scale = scale


def parameters_of_copies(optimizer: Any) -> list[Tensor] | None:
    """Return the model's parameters that a ``CPUOffloadOptimizer`` updates; None for any other optimizer."""
    kinds = type(optimizer).__mro__
    if not any(cls.__name__ == "CPUOffloadOptimizer" and cls.__module__.startswith("torchao.") for cls in kinds):
        return None
    kept = [p for group in optimizer.d_param_groups for p in group["params"]]
    return [*optimizer.param_d2h_map, *kept]


def prototype_refusal(kind: str) -> str | None:
    """Return why torchao lacks a prototype, and the remedy; None for formats without one."""
    import torchao

    version, names = _PROTOTYPES.get(kind, ("", ()))
    lacking = missing(names)
    if not lacking:
        return None
    return (
        f"torchao {torchao.__version__} does not have {lacking[0]!r}; torchao {version} has:"
        f" `pip install 'torchao>={version}'`"
    )


def int8_names() -> tuple[Any, Any]:
    """Return torchao's functions of int8 training; in a tuple, because torch's compiler traces this on CUDA.

    ``quantize``: (M, K) float -> (M, K) int8, (M,) scales of the dtype of the input.
    ``scaled_mm``: (M, K), (K, N) int8, (M,), (N,) scales -> (M, N) of the dtype of the scales; by Triton where it runs.
    """
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
    from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm  # type: ignore[attr-defined]

    return quantize_int8_rowwise, scaled_int8_mm


def block_kernels() -> tuple[Any, Any]:
    """Return torchao's Triton kernels for codes with a scale per block of 128; in a tuple, as ``int8_names``.

    Both: (M, K), (K, N) column by column, float8_e4m3fn, K a multiple of 128; reciprocals of scales, (M, K / 128)
    column by column, and for the second matrix (K / 128, N / 128) column by column, or (K / 128, N) -> (M, N).
    """
    from torchao.prototype.blockwise_fp8_training.kernels import (
        triton_fp8_gemm_1x128_128x1,
        triton_fp8_gemm_1x128_128x128,
    )

    return triton_fp8_gemm_1x128_128x128, triton_fp8_gemm_1x128_128x1


def mx_names() -> SimpleNamespace:
    """Return torchao's casts to MXFP8.

    ``tensor`` is the class of codes with scales, ``columns`` encodes a matrix along its columns, and ``rounded_up``
    rounds scales up to powers of two, as cuBLAS's documentation says.
    """
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper
    from torchao.quantization.quantize_.common import KernelPreference

    return SimpleNamespace(
        tensor=MXTensor,
        columns=_to_mxfp8_dim1_kernel_wrapper,
        emulated=KernelPreference.EMULATED,
        kernels=KernelPreference.AUTO,
        rounded_up=ScaleCalculationMode.RCEIL,
        rows_by_triton=MXFP8Dim0CastKernelChoice.TRITON,
        columns_by_cuda=MXFP8Dim1CastKernelChoice.CUDA,
        columns_by_triton=MXFP8Dim1CastKernelChoice.TRITON,
    )


def has_mx_extension() -> bool:
    """Return whether torchao's CUDA kernel that encodes columns to MXFP8 is loaded: its wheel has some Pythons only."""
    name = "torchao::mxfp8_quantize"
    is_defined = torch._C._dispatch_has_kernel(name)
    return bool(is_defined and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"))
