"""Private names of torchao that this package uses. torchao is imported inside the functions."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

from torch import Tensor

from lightning_lowprec.private.names import missing

_TENSOR: Final = "torchao.float8.float8_training_tensor.Float8TrainingTensor"
_ARGUMENTS: Final = ("_data", "_scale", "_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_axiswise_dim")


def moved() -> list[str]:
    """Return the private names that the installed torchao no longer has; [] without torchao."""
    return [] if find_spec("torchao") is None else missing([f"{_TENSOR}.{name}" for name in _ARGUMENTS])


def constructor_arguments(tensor: Any) -> tuple[Any, ...]:
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
