"""How large the training steps are on this device: the same for all contenders, and for the linear table."""

from __future__ import annotations

import torch

from benchmarks.gpu_lane import models
from benchmarks.gpu_lane.settings import Settings

BATCHES = (4, 2, 1)
ON_H200 = 139 * 2**30
"""Bytes; sizes are those of an H200 where there is no GPU to ask."""


def step_size(settings: Settings) -> tuple[models.Shape, int]:
    """The shape of ``step8b`` on this device, and sequences per step: asked for, or what fits."""
    if settings.smoke:
        return models.TOY, settings.batch or 2
    device = settings.torch_device
    memory = torch.cuda.get_device_properties(device).total_memory if settings.cuda else ON_H200
    batches = BATCHES if settings.batch is None else (settings.batch,)
    return models.fitting(models.SHAPES["8b"], memory, batches)


def step_tokens(settings: Settings) -> int:
    """Rows of a Linear's input in that step."""
    shape, batch = step_size(settings)
    return shape.sequence * batch
