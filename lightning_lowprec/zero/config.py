"""Translate the options of a plugin into the sections of a DeepSpeed config, or raise where the config says otherwise.

========================================  ==============================================================
the plugin                                the config
========================================  ==============================================================
bf16 outside of FP8                       ``bf16.enabled: true``
fp16 outside of FP8                       ``fp16.enabled: true``
``loss_scale=LossScale(...)``             ``fp16``: ``initial_scale_power``, ``loss_scale_window``, ...
``loss_scale=1024.0``                     ``fp16.loss_scale: 1024.0``
``skip_nonfinite=True`` with bf16         ``bf16.check_grad_overflow: true``
``grad_accumulation_dtype``               ``data_types.grad_accum_dtype``
``grad_reduce_dtype``                     ``communication_data_type``
``buffer_dtype``                          ``data_types.buffer_dtype``
========================================  ==============================================================

A field that the user has set already must have the same value, or be ``"auto"``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.loss_scale import LossScale

SCALE_FIELDS: Final[Mapping[str, float]] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""The fields of ``fp16`` that Lightning's DeepSpeedStrategy takes as arguments too, with Lightning's defaults."""
_SECTIONS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_HALF_MASTERS: Final = {"bf16": "bf16_master_weights_and_grads", "fp16": "fp16_master_weights_and_grads"}
_ELSEWHERE: Final = "on one device, under 'ddp' and under 'fsdp2'"


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The options of a plugin that DeepSpeed carries out, as they were before an engine took the plugin's work over."""

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
    def of(cls, plugin: LowPrecision) -> ZeroOptions:
        """Return the options of a plugin whose device is known."""
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
    """Raise ValueError, naming ``strategy``, if a precision cannot run under DeepSpeed, whatever the stage."""
    reason = _refusal(plugin) if plugin.engine is None else None  # an engine has checked and taken the options before
    if reason is not None:
        raise ValueError(f"`precision={plugin.precision!r}` does not run under `strategy={strategy!r}`: {reason}.")


def _refusal(plugin: LowPrecision) -> str | None:
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


def translated(source: Mapping[str, Any], options: ZeroOptions, arguments: Mapping[str, float]) -> dict[str, Any]:
    """Return a copy of ``source``, the config of the user or the strategy, with the plugin's options in it.

    ``arguments`` are :data:`SCALE_FIELDS` as the strategy was given them.

    Raises:
        ValueError: a field of the config, or an argument, has another value than the plugin (the message has both), or
            DeepSpeed cannot scale the loss as the plugin would.
    """
    config = copy.deepcopy(dict(source))
    if "bfloat16" in config:  # DeepSpeed's own older name
        config.setdefault("bf16", config.pop("bfloat16"))
    half = _SECTIONS[options.dtype]
    other = "fp16" if half == "bf16" else "bf16"
    _set(config, options, f"{half}.enabled", True)
    for field in (f"{other}.enabled", f"{half}.{_HALF_MASTERS[half]}", "torch_autocast.enabled"):
        if _get(config, field) not in (None, False):
            _set(config, options, field, False)
    if half == "fp16":
        _scale_loss(config, options, arguments)
    elif options.skips:
        _set(config, options, "bf16.check_grad_overflow", True)
    for field, dtype in (
        ("data_types.grad_accum_dtype", options.accumulation),
        ("communication_data_type", options.reduce),
        ("data_types.buffer_dtype", options.buffers),
    ):
        if dtype is not None:
            _set(config, options, field, _NAMES[dtype])
    return config


def _scale_loss(config: dict[str, Any], options: ZeroOptions, arguments: Mapping[str, float]) -> None:
    """Write the fields of the loss scale; the default scale leaves them to the config and the strategy."""
    assert options.loss_scale is not None  # fp16 always scales the loss
    if options.loss_scale == LossScale():
        for field, value in arguments.items():
            config["fp16"].setdefault(field, value)
        return
    for field, value in scale_fields(options.loss_scale, options.precision).items():
        argument = arguments.get(field, value)
        if argument != SCALE_FIELDS[field] and argument != value:
            raise _contradiction(options, f"fp16.{field}", value, "the strategy has", f"{field}={argument!r}")
        _set(config, options, f"fp16.{field}", value)


def scale_fields(scale: LossScale, precision: str) -> dict[str, float]:
    """Return a loss scale as the fields of DeepSpeed's ``fp16`` section.

    Raises:
        ValueError: DeepSpeed's scale cannot do this: it doubles, halves, starts at a power of two, and has a floor that
            is an integer, at which it stops the run at once. The message names ``precision``.
    """
    if scale.growth_factor == scale.backoff_factor == 1.0:
        return {"loss_scale": scale.initial}
    allowed: tuple[tuple[str, Any, bool, str], ...] = (
        ("initial", scale.initial, math.log2(scale.initial).is_integer() and scale.initial >= 1, "a power of two"),
        ("growth_factor", scale.growth_factor, scale.growth_factor == 2.0, "2.0"),
        ("backoff_factor", scale.backoff_factor, scale.backoff_factor == 0.5, "0.5"),
        ("floor", scale.floor, float(scale.floor).is_integer(), "an integer from 1"),
        ("patience_at_floor", scale.patience_at_floor, scale.patience_at_floor in (1, 50), "the default"),
    )
    for field, value, fits, expected in allowed:
        if not fits:
            raise ValueError(
                f"`precision={precision!r}`: `LossScale({field}={value!r})` is not possible under DeepSpeed, which"
                f" scales the loss itself; expected {expected}. Change the field, or use 'ddp' or 'fsdp2'."
            )
    return {
        "loss_scale": 0,
        "initial_scale_power": int(math.log2(scale.initial)),
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis,
        "min_loss_scale": int(scale.floor),
    }


# ---- fields by dotted names


def _get(config: Mapping[str, Any], field: str) -> Any:
    section, _, name = field.rpartition(".")
    return (config.get(section) or {} if section else config).get(name)


def _set(config: dict[str, Any], options: ZeroOptions, field: str, value: Any) -> None:
    """Write a field; raise if the user has set it to another value."""
    before = _get(config, field)
    if before not in (None, "auto", value):
        raise _contradiction(options, field, value, "the DeepSpeed config has", f"{field}={before!r}")
    section, _, name = field.rpartition(".")
    (config.setdefault(section, {}) if section else config)[name] = value


def _contradiction(options: ZeroOptions, field: str, value: Any, who: str, got: str) -> ValueError:
    return ValueError(
        f"`precision={options.precision!r}` means `{field}={value!r}`, and {who} `{got}`. Leave the latter out, or"
        " choose a precision that fits."
    )
