"""fp16 and bf16 by autocast over float32 weights."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.hardware import bf16_refusal, default_device
from lightning_lowprec.optim import LossScale, LossScaler
from lightning_lowprec.plugins.base import LowPrecision, alive
from lightning_lowprec.plugins.loss_scale_choice import LossScaleChoice, resolve_loss_scale

HalfName = Literal["bf16", "fp16", "auto"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfMixed(LowPrecision):
    """float32 weights, half-precision compute by ``torch.autocast``.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` (with loss scaling), or ``"auto"``: bf16 where the device has it, else fp16.
        loss_scale: ``"auto"`` (dynamic for fp16, none for bf16), ``"dynamic"``, a number for a static scale, or a
            :class:`~lightning_lowprec.optim.LossScale`.

    Raises:
        ValueError: an unknown dtype; a loss scale with bf16, which has the range of float32; none with fp16.
    """

    def __init__(self, dtype: HalfName = "auto", *, loss_scale: LossScaleChoice = "auto") -> None:
        if dtype not in get_args(HalfName):
            raise ValueError(f"`dtype={dtype!r}` is not valid; expected one of: {', '.join(get_args(HalfName))}.")
        self._dtype: torch.dtype | None = DTYPES.get(dtype)
        # "auto" checks the arguments as fp16 would; whether they are used is decided on the device
        scale = resolve_loss_scale("fp16" if dtype == "auto" else dtype, loss_scale)
        self._auto_loss_scale: LossScale | None = scale if dtype == "auto" else None
        super().__init__(None if dtype == "auto" else scale)
        self.precision = {"auto": "half-auto", "bf16": "bf16-mixed", "fp16": "16-mixed"}[dtype]

    @property
    @override
    def autocast_dtype(self) -> torch.dtype:
        """``torch.bfloat16`` or ``torch.float16``; ``"auto"`` asks the device that the module will run on."""
        if self._dtype is not None:
            return self._dtype
        return torch.bfloat16 if bf16_refusal(self._device or default_device()) is None else torch.float16

    @override
    def how(self, device: torch.device) -> str:
        """Which dtype, and why."""
        if self._dtype is not None:
            return f"{str(self._dtype).removeprefix('torch.')} autocast"
        refusal = bf16_refusal(device)
        if refusal is None:
            return f"bf16 autocast, since {device.type} has bf16"
        return f"fp16 autocast with loss scaling, since {refusal}"

    @override
    def _settle(self, module: Module, device: torch.device) -> None:
        if self._dtype is not None:
            return
        rank_zero_info(f"{self.precision}: {self.how(device)}.")
        self._dtype = torch.bfloat16 if bf16_refusal(device) is None else torch.float16
        if self._dtype is torch.float16:
            assert self._auto_loss_scale is not None
            self.scaler = LossScaler(self._auto_loss_scale)
            for optimizer in alive(self._optimizers):
                self.scaler.watch(optimizer)
