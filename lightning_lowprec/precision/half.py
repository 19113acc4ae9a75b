"""fp16 and bf16 by autocast over float32 weights."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.conversion.backends import unconvert
from lightning_lowprec.hardware import bf16_refusal, default_device
from lightning_lowprec.masters.options import MasterWeights, resolve_masters
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.loss_scale import LossScale, LossScaler
from lightning_lowprec.precision.loss_scale_choice import LossScaleChoice, resolve_loss_scale
from lightning_lowprec.references import alive

HalfName = Literal["bf16", "fp16", "auto"]
_NAMES: dict[tuple[str, str | None], str] = {
    ("auto", None): "half-auto",
    ("bf16", None): "bf16-mixed",
    ("fp16", None): "16-mixed",
    ("fp16", "fp32"): "fp16-master",
    ("bf16", "fp32"): "bf16-master",
    ("bf16", "remainder"): "bf16-remainder",
    ("bf16", "stochastic"): "bf16-sr",
    **{("auto", form): "half-auto-master" for form in ("fp32", "remainder", "stochastic")},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfMixed(LowPrecision):
    """Half-precision compute by ``torch.autocast``, over float32 weights or over half weights with float32 masters.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` (with loss scaling), or ``"auto"``: bf16 where the device has it, else fp16.
        loss_scale: ``"auto"`` (dynamic for fp16, none for bf16), ``"dynamic"``, a number for a static scale, or a
            :class:`~lightning_lowprec.precision.loss_scale.LossScale`.

        master_weights: False keeps float32 weights. Otherwise the weights are half and the optimizer updates float32
            masters: ``True`` keeps them (4 bytes per parameter), ``"remainder"`` keeps the exact masters in 2 bytes
            (bf16), ``"stochastic"`` keeps none and rounds the updated weights stochastically (bf16). A
            :class:`~lightning_lowprec.masters.config.MasterConfig` says more: stochastically rounded bf16 moments, the seed.
        buffer_dtype: with masters, what floating-point buffers are cast to; None leaves them (rotary tables and
            running statistics want float32).
        grad_reduce_dtype: with masters, ``torch.float32`` averages gradients over the ranks of DDP in float32 and
            rounds the average once; None averages in the weights' dtype.
        grad_accumulation_dtype: with masters, ``torch.float32`` accumulates the gradients of micro-batches in float32
            (2 more bytes per parameter) and, under DDP, averages them so too; None accumulates in the weights' dtype.

    Raises:
        ValueError: an unknown dtype; a loss scale with bf16, which has the range of float32; none with fp16; an option
            that goes with masters without them.
    """

    def __init__(
        self,
        dtype: HalfName = "auto",
        *,
        loss_scale: LossScaleChoice = "auto",
        master_weights: MasterWeights = False,
        buffer_dtype: torch.dtype | None = None,
        grad_reduce_dtype: torch.dtype | None = None,
        grad_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in get_args(HalfName):
            raise ValueError(f"`dtype={dtype!r}` is not valid; expected one of: {', '.join(get_args(HalfName))}.")
        self._dtype: torch.dtype | None = DTYPES.get(dtype)
        # "auto" checks the arguments as fp16 would; whether they are used is decided on the device
        scale = resolve_loss_scale("fp16" if dtype == "auto" else dtype, loss_scale)
        self._auto_loss_scale: LossScale | None = scale if dtype == "auto" else None
        masters = resolve_masters(
            dtype,
            master_weights,
            buffer_dtype=buffer_dtype,
            grad_reduce_dtype=grad_reduce_dtype,
            grad_accumulation_dtype=grad_accumulation_dtype,
        )
        super().__init__(None if dtype == "auto" else scale, masters)
        self.precision = _NAMES[dtype, None if masters is None else masters.config.form]

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
        unconvert(module)
        if self._dtype is not None:
            return
        rank_zero_info(f"{self.precision}: {self.how(device)}.")
        self._dtype = torch.bfloat16 if bf16_refusal(device) is None else torch.float16
        if self._dtype is torch.float16:
            if self.masters is not None and self.masters.config.form != "fp32":
                raise RuntimeError(
                    f"`master_weights={self.masters.config.form!r}` needs bf16, but {bf16_refusal(device)}; use"
                    " `master_weights=True`."
                )
            assert self._auto_loss_scale is not None
            self.scaler = LossScaler(self._auto_loss_scale)
            for optimizer in alive(self._optimizers):
                self.scaler.watch(optimizer)
