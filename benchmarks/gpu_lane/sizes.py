"""How large the training steps are on this device: the same for all contenders, and for the linear table."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu_lane import models
from benchmarks.gpu_lane.settings import Settings

BATCHES = (4, 2, 1)
ON_H200 = 139 * 2**30
"""Bytes; sizes are those of an H200 where there is no GPU to ask."""

CONVERGENCE_BATCH = 32
"""Sequences of 1024 tokens: 32,768 tokens per step, and 39 GiB at most, which 80 GB hold too."""
TOY_CONVERGENCE = replace(models.TOY, name="toy 124m", vocab=320, tied=True)


def step_size(model: str, settings: Settings) -> tuple[models.Shape, int]:
    """The shape of a step part (``"8b"``, ``"1b"``), and sequences per step: asked for, or what fits."""
    if settings.smoke:
        return models.TOY, settings.batch or 2
    device = settings.torch_device
    memory = torch.cuda.get_device_properties(device).total_memory if settings.cuda else ON_H200
    batches = BATCHES if settings.batch is None else (settings.batch,)
    return models.fitting(models.SHAPES[model], memory, batches)


def convergence_size(settings: Settings) -> tuple[models.Shape, int]:
    """The model of 124 million parameters, and sequences per step."""
    if settings.smoke:
        return TOY_CONVERGENCE, settings.batch or 2
    return models.SHAPES["124m"], settings.batch or CONVERGENCE_BATCH


def step_tokens(model: str, settings: Settings) -> int:
    """Rows of a Linear's input in that step."""
    shape, batch = step_size(model, settings)
    return shape.sequence * batch
