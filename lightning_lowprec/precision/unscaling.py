"""What clipping needs first: gradients unscaled, and at the masters where there are some."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_lowprec.masters.optimizer import has_masters, main_params, move_grads_to_masters
from lightning_lowprec.precision.loss_scale import LossScaler


def unscale_to_clip(scaler: LossScaler | None, optimizer: Optimizer) -> None:
    """Unscale the gradients and move them to the masters; a second call before the step changes nothing."""
    if scaler is not None:
        scaler.unscale(optimizer)
    elif has_masters(optimizer):
        move_grads_to_masters(optimizer)


def zero_if_nonfinite(scaler: LossScaler | None, optimizer: Optimizer) -> None:
    """Zero unscaled gradients of a step that the scaler will skip."""
    if scaler is None or not scaler.found_inf(optimizer):
        return
    for param in main_params(optimizer):
        if param.grad is not None:
            param.grad.zero_()
