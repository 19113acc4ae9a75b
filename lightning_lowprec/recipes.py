"""NeMo's precision recipes under NeMo's names. Each returns a plugin of this package with NeMo's values.

    from lightning_lowprec import recipes

    trainer = L.Trainer(plugins=recipes.bf16_mixed())

The FP8 recipes run through Transformer Engine. With delayed and current scaling, whose weights FSDP2 can gather in FP8,
they set NeMo's ``fp8_params``. With scales per block, weights stay in half precision.

The values are those of ``nemo.collections.llm.recipes.precision.mixed_precision`` (NeMo 2), where they are arguments of
``MegatronMixedPrecision``. One value differs: NeMo sets ``autocast_enabled=False``, because Megatron's layers choose
their float32 parts themselves. Other models need autocast for softmax, norms and losses, so autocast stays on here.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.te.plugin import FP8TE


def bf16_mixed() -> HalfMixed:
    """bf16 weights and compute, float32 masters, gradients accumulated and reduced in float32.

    18 bytes per parameter with AdamW: 2 (weight), 4 (gradient), 4 (master), 8 (moments).
    """
    return HalfMixed(
        "bf16", master_weights=True, grad_reduce_dtype=torch.float32, grad_accumulation_dtype=torch.float32
    )


def fp16_mixed() -> HalfMixed:
    """fp16 weights, gradients and compute, float32 masters, Megatron's loss scaling.

    16 bytes per parameter with AdamW. The scale starts at 2**32, so the first steps of a run are skipped until the
    scale fits: about 18 steps if gradients are around 1.
    """
    return HalfMixed("fp16", master_weights=True, loss_scale=_megatron_scale())


def bf16_with_fp8_mixed() -> FP8TE:
    """:func:`bf16_mixed` with hybrid delayed scaling: margin 0, the largest amax of 1024 steps."""
    return FP8TE("delayed", **_DELAYED, **_bf16())


def fp16_with_fp8_mixed() -> FP8TE:
    """:func:`fp16_mixed` with hybrid delayed scaling: margin 0, the largest amax of 1024 steps."""
    return FP8TE("delayed", **_DELAYED, **_fp16())


def bf16_with_mxfp8_mixed() -> FP8TE:
    """:func:`bf16_mixed` with MXFP8, hybrid as in NeMo (Blackwell)."""
    return FP8TE("mxfp8", fp8_format="hybrid", **_bf16())


def fp16_with_mxfp8_mixed() -> FP8TE:
    """:func:`fp16_mixed` with MXFP8, hybrid as in NeMo (Blackwell)."""
    return FP8TE("mxfp8", fp8_format="hybrid", **_fp16())


def bf16_with_fp8_current_scaling_mixed() -> FP8TE:
    """:func:`bf16_mixed` with hybrid current scaling, and the first and the last block in bf16."""
    return FP8TE("current", fp8_format="hybrid", fp8_params=True, first_last_layers_bf16=True, **_bf16())


def fp16_with_fp8_current_scaling_mixed() -> FP8TE:
    """:func:`fp16_mixed` with hybrid current scaling, and the first and the last block in fp16."""
    return FP8TE("current", fp8_format="hybrid", fp8_params=True, first_last_layers_bf16=True, **_fp16())


def bf16_with_fp8_subchannel_scaling_mixed() -> FP8TE:
    """:func:`bf16_mixed` with blockwise scaling, hybrid as in NeMo."""
    return FP8TE("block", fp8_format="hybrid", **_bf16())


def fp16_with_fp8_subchannel_scaling_mixed() -> FP8TE:
    """:func:`fp16_mixed` with blockwise scaling, hybrid as in NeMo."""
    return FP8TE("block", fp8_format="hybrid", **_fp16())


_DELAYED: dict[str, Any] = {
    "fp8_params": True,
    "fp8_format": "hybrid",
    "margin": 0,
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
}


NAMES: Final = tuple(name for name in globals() if name.endswith("_mixed"))
"""Every recipe of this file."""


def _bf16() -> dict[str, Any]:
    float32 = {"grad_reduce_dtype": torch.float32, "grad_accumulation_dtype": torch.float32}
    return {"base": "bf16", "master_weights": True, **float32}


def _fp16() -> dict[str, Any]:
    return {"base": "fp16", "master_weights": True, "loss_scale": _megatron_scale()}


def _megatron_scale() -> LossScale:
    return LossScale(initial=2.0**32, floor=1.0, growth_interval=1000, hysteresis=2)
