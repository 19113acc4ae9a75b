"""Train in float32 and evaluate in half precision: ``bf16_full_eval`` of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.conversion.options import shows
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.options import BASE_DTYPES


@final
@shows()
class HalfEval(LowPrecision):
    """Validation, test and prediction under autocast in half precision; training in float32, as with ``32-true``.

    The weights stay float32, so evaluation saves time and activations, and not the bytes of the weights. In Fabric a
    model trains while it is in train mode.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: the dtype is unknown, or the model is sharded by FSDP2, which gathers weights in one dtype.
    """

    def __init__(self, dtype: Literal["bf16", "fp16"] = "bf16") -> None:
        super().__init__(None)
        self._dtype = BASE_DTYPES[dtype]
        self.precision = f"{dtype}-eval"

    @property
    @override
    def autocast_dtype(self) -> torch.dtype:
        """The dtype of evaluation: ``torch.bfloat16`` or ``torch.float16``."""
        return self._dtype

    @property
    @override
    def peak_rate_dtype(self) -> torch.dtype:
        """``torch.float32``: the dtype of training."""
        return torch.float32

    @override
    def how(self, device: torch.device) -> str:
        """Return the dtypes of training and of evaluation."""
        return f"float32 in training, {str(self._dtype).removeprefix('torch.')} autocast in evaluation"

    @override
    def bind_shards(self, reshard: Callable[[Module], None]) -> None:
        raise ValueError(
            f"`HalfEval` (precision={self.precision!r}) does not run under FSDP2, which gathers weights in one dtype."
            " Use '32-true' or 'bf16-mixed' there."
        )

    def _trains(self) -> bool:
        self._known_device()
        return any(module.training for module in self.modules.prepared)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast in evaluation, and a context that does nothing in training."""
        return nullcontext() if self._trains() else super().forward_context()

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors in Fabric's evaluation; leave other batches alone."""
        return data if self._trains() else super().convert_input(data)
