"""The optimizer of every model of the experiment: AdamW with a short linear warm-up, as in the demo's ByteGPT."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn

from lightning_lowprec.tools.demo.model import WARMUP_STEPS


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> OptimizerLRScheduler:
    """Return AdamW over the parameters that train, and its warm-up, as ``configure_optimizers`` returns them."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
