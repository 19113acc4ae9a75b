"""Translate the choice of a plugin into the sections of a DeepSpeed config, or raise where the config says otherwise.

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
from typing import Any, Final

import torch

from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.zero.choice import Choice

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


def translated(config: Mapping[str, Any], choice: Choice, arguments: Mapping[str, float]) -> dict[str, Any]:
    """Return a copy of a config, with the plugin's choice in it.

    Args:
        config: the user's, or the one that Lightning's strategy makes.
        choice: the plugin's.
        arguments: :data:`SCALE_FIELDS` as the strategy was given them.

    Raises:
        ValueError: a field of the config, or an argument, has another value than the plugin (the message has both), or
            DeepSpeed cannot scale the loss as the plugin would.
    """
    made = copy.deepcopy(dict(config))
    if "bfloat16" in made:  # DeepSpeed's own older name
        made.setdefault("bf16", made.pop("bfloat16"))
    own = _SECTIONS[choice.dtype]
    other = "fp16" if own == "bf16" else "bf16"
    _set(made, choice, f"{own}.enabled", True)
    for field in (f"{other}.enabled", f"{own}.{_HALF_MASTERS[own]}", "torch_autocast.enabled"):
        if _get(made, field) not in (None, False):
            _set(made, choice, field, False)
    if own == "fp16":
        _scale_loss(made, choice, arguments)
    elif choice.skips:
        _set(made, choice, "bf16.check_grad_overflow", True)
    for field, dtype in (
        ("data_types.grad_accum_dtype", choice.accumulation),
        ("communication_data_type", choice.reduce),
        ("data_types.buffer_dtype", choice.buffers),
    ):
        if dtype is not None:
            _set(made, choice, field, _NAMES[dtype])
    return made


def _scale_loss(made: dict[str, Any], choice: Choice, arguments: Mapping[str, float]) -> None:
    """Write the fields of the loss scale; the default scale leaves them to the config and the strategy."""
    assert choice.loss_scale is not None  # fp16 always scales the loss
    if choice.loss_scale == LossScale():
        for field, value in arguments.items():
            made["fp16"].setdefault(field, value)
        return
    for field, value in scale_fields(choice.loss_scale, choice.precision).items():
        argument = arguments.get(field, value)
        if argument != SCALE_FIELDS[field] and argument != value:
            raise _contradiction(choice, f"fp16.{field}", value, "the strategy has", f"{field}={argument!r}")
        _set(made, choice, f"fp16.{field}", value)


def scale_fields(scale: LossScale, precision: str) -> dict[str, float]:
    """Return a loss scale as the fields of DeepSpeed's ``fp16`` section.

    Args:
        scale: the plugin's.
        precision: the name of the precision, for messages.

    Raises:
        ValueError: DeepSpeed's scale cannot do this: it doubles, halves, starts at a power of two, and has a floor that
            is an integer, at which it stops the run at once.
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


def _set(config: dict[str, Any], choice: Choice, field: str, value: Any) -> None:
    """Write a field; raise if the user has set it to another value."""
    found = _get(config, field)
    if found not in (None, "auto", value):
        raise _contradiction(choice, field, value, "the DeepSpeed config has", f"{field}={found!r}")
    section, _, name = field.rpartition(".")
    (config.setdefault(section, {}) if section else config)[name] = value


def _contradiction(choice: Choice, field: str, value: Any, who: str, found: str) -> ValueError:
    return ValueError(
        f"`precision={choice.precision!r}` means `{field}={value!r}`, and {who} `{found}`. Leave the latter out, or"
        " choose a precision that fits."
    )
