"""Private names of torchao that this package uses. torchao is imported inside the functions."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import Tensor

from lightning_lowprec.private.names import missing

_TENSOR = "torchao.float8.float8_training_tensor.Float8TrainingTensor"


def moved() -> list[str]:
    """Return the private names that the installed torchao no longer has; [] without torchao."""
    return [] if find_spec("torchao") is None else missing([f"{_TENSOR}._data", f"{_TENSOR}._scale"])


def codes_of(tensor: Any) -> Tensor:
    """Return the codes of a ``Float8TrainingTensor``: float8, of the same shape."""
    codes: Tensor = tensor._data
    return codes


def set_scale(tensor: Any, scale: Tensor) -> None:
    """Give a ``Float8TrainingTensor`` another scale, in place."""
    tensor._scale = scale
