"""The optimizer of every model of the experiment: AdamW, whose learning rate rises shortly and then falls to zero.

With a constant learning rate the last loss would jump from step to step, and differ between two runs by luck.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn

from lightning_lowprec.tools.demo.model import WARMUP_STEPS


def adamw(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> OptimizerLRScheduler:
    """Return AdamW over the parameters that train, and its schedule, as ``configure_optimizers`` returns them."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share, steps=steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def share(step: int, steps: int) -> float:
    """Return the share of the learning rate before step ``step`` of ``steps``, counted from 0: a triangle."""
    warmup = min(WARMUP_STEPS, steps // 2)
    return min((step + 1) / (warmup + 1), (steps - step) / (steps - warmup))
