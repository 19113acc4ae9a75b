"""What a plugin has chosen that DeepSpeed will do: dtypes, loss scale, skipped steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.loss_scale import LossScale

_ELSEWHERE: Final = "on one device, under 'ddp' and under 'fsdp2'"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of a plugin, as it was before an engine took the plugin's work over."""

    precision: str
    """The name of the precision, for messages."""
    dtype: torch.dtype
    """Of the weights: ``torch.bfloat16`` or ``torch.float16``."""
    loss_scale: LossScale | None
    """The scale of the loss; None: not scaled."""
    skips: bool
    """Whether steps with gradients that are not finite must be skipped."""
    reduce: torch.dtype | None = None
    """The dtype in which gradients are reduced; None: DeepSpeed's default, that of the weights."""
    accumulation: torch.dtype | None = None
    """The dtype in which gradients of micro-batches are accumulated; None: DeepSpeed's default."""
    buffers: torch.dtype | None = None
    """The dtype of floating-point buffers; None: they stay."""

    @classmethod
    def of(cls, plugin: LowPrecision) -> Choice:
        """Return the choice of a plugin whose device is known."""
        masters, scaler = plugin.masters, plugin.scaler
        return cls(
            precision=plugin.precision,
            dtype=plugin.autocast_dtype,
            loss_scale=scaler.config if scaler is not None and scaler.scales_loss else None,
            skips=scaler is not None,
            reduce=None if masters is None else masters.gradients.reduce,
            accumulation=None if masters is None else masters.gradients.accumulation,
            buffers=None if masters is None else masters.buffer_dtype,
        )


def check_plugin(plugin: LowPrecision, strategy: str) -> None:
    """Raise if a precision cannot run under DeepSpeed, whatever the stage.

    Args:
        plugin: the precision's.
        strategy: the name of the strategy, for the message.

    Raises:
        ValueError: the message has the reason and the way out.
    """
    reason = _refusal(plugin)
    if reason is not None:
        raise ValueError(f"`precision={plugin.precision!r}` does not run under `strategy={strategy!r}`: {reason}.")


def _refusal(plugin: LowPrecision) -> str | None:
    if plugin.engine is not None:  # an earlier Trainer or Fabric has checked, and the engine has taken the options
        return None
    if plugin.masters is not None and (other := _other_masters(plugin.masters.config)) is not None:
        return (
            f"ZeRO keeps the masters itself, in float32, and has no {other}. Use `precision='bf16-master'`, or run"
            f" {plugin.precision!r} {_ELSEWHERE}"
        )
    if plugin.masters is None and plugin.weights is None:
        return (
            "`weights='keep'` trains half-precision weights without masters, and ZeRO always has float32 masters. Leave"
            " `weights` out"
        )
    if plugin.head != "bf16":
        return (
            f"`head={plugin.head!r}` reads the weight of the output head outside of its layer, where ZeRO does not"
            " see it. Leave `head` out, or use 'fsdp2'"
        )
    if plugin.needs_fp8_gather is not None:
        return f"`{plugin.needs_fp8_gather}` keeps weights in FP8, and ZeRO gathers them in half precision. Use 'fsdp2'"
    return None


def _other_masters(config: MasterConfig) -> str | None:
    if config.form != "fp32":
        return f"`form={config.form!r}`"
    if config.moments != "fp32":
        return f"`moments={config.moments!r}`"
    return None if config.update == "step" else f"`update={config.update!r}`"


def stage_of(config: dict[str, Any]) -> int:
    """Return the stage of ZeRO in a DeepSpeed config; 0: none."""
    return int(config.get("zero_optimization", {}).get("stage", 0))
