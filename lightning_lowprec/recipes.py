"""NeMo's precision recipes by their own names: each returns one of our plugins with NeMo's values.

    from lightning_lowprec import recipes

    trainer = L.Trainer(plugins=recipes.bf16_mixed())

The values are those of ``nemo.collections.llm.recipes.precision.mixed_precision`` (NeMo 2), where they are arguments of
``MegatronMixedPrecision``. One is not taken over: ``autocast_enabled=False``. Megatron's own layers say which of their
parts run in float32; of other models' softmax, norms and losses autocast does, so it stays on.
"""

from __future__ import annotations

import torch

from lightning_lowprec.optim import LossScale
from lightning_lowprec.plugins import HalfMixed


def bf16_mixed() -> HalfMixed:
    """bf16 weights and compute, float32 masters, gradients accumulated and reduced in float32.

    18 bytes per parameter with AdamW: 2 (weight), 4 (gradient), 4 (master), 8 (moments).
    """
    return HalfMixed(
        "bf16", master_weights=True, grad_reduce_dtype=torch.float32, grad_accumulation_dtype=torch.float32
    )


def fp16_mixed() -> HalfMixed:
    """fp16 weights, gradients and compute, float32 masters, Megatron's loss scaling.

    16 bytes per parameter with AdamW. The scale starts at 2**32, so that the first steps of a run are skipped until it
    fits: about 18 of them, where gradients are around 1.
    """
    scale = LossScale(initial=2.0**32, floor=1.0, growth_interval=1000, hysteresis=2)
    return HalfMixed("fp16", master_weights=True, loss_scale=scale)
