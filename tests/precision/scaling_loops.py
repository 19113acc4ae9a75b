"""A training loop that runs with our scaler and with torch's alike."""

from typing import Any

import torch
from torch import Tensor

from lightning_lowprec.precision.loss_scale import LossScaler

X = torch.tensor([3.0, 4.0])
INF, NAN = float("inf"), float("nan")


def sgd(*weights: Tensor) -> torch.optim.SGD:
    return torch.optim.SGD(weights, lr=1.0)


def train(scaler: Any, optimizer: Any, loss: Tensor) -> None:
    """One step with ours or with torch's scaler."""
    optimizer.zero_grad()
    if isinstance(scaler, LossScaler):
        scaler.scale_loss(loss).backward()
        scaler.step(optimizer)
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
