"""The parts of a training step, in the order in which they run.

    loss --> scale (fp16) --> backward --> [DDP / FSDP2 reduce] --> unscale --> move gradients to the masters
         --> clip --> step, or skip if a gradient is not finite (fp16, `skip_nonfinite`) --> new loss scale
         --> masters to weights

On a GPU, unscaling and clipping are factors that the step multiplies by: see `masters/step.py`. A plugin without
loss scaling skips every line about the scale. The hooks of
:class:`~lightning_lowprec.precision.base.LowPrecision` call the functions below. Without loss scaling and
``skip_nonfinite``, ``scaler`` is None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import main_params, show_master_grads
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.numerics.parameters import clip_grad_norm, on_several_meshes
from lightning_lowprec.precision.loss_scale import LossScaler
from lightning_lowprec.private import lightning as private
from lightning_lowprec.private.either import GradClipAlgorithmType, LightningModule, MisconfigurationException
from lightning_lowprec.private.torch_optimizers import refuse_copies


def clip_by_norm(
    scaler: LossScaler | None, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
) -> Tensor | None:
    """Unscale and clip gradients that wait for the step, or that lie on several meshes; return their norm.

    The result is None if torch can clip these gradients in place. The norm of a step that will be skipped is 0.
    """
    _refuse_copies(optimizer)
    if not masters_step.defers(optimizer):
        if not on_several_meshes(main_params(optimizer)):
            return None
        unscale_or_zero(scaler, optimizer)
        return clip_grad_norm(main_params(optimizer), max_norm, norm_type)
    if scaler is not None:
        scaler.unscale(optimizer, defer=True)
    norm = masters_step.clip_by_norm(optimizer, max_norm, norm_type)
    return torch.zeros_like(norm) if scaler is not None and scaler.found_inf(optimizer) else norm


def _refuse_copies(optimizer: Optimizer) -> None:
    refuse_copies(optimizer, "clipping, because it copies each gradient before the norm of all is known")


def clips(scaler: LossScaler | None, optimizer: Optimizer, clip_val: float, algorithm: GradClipAlgorithmType) -> bool:
    """Unscale; return whether the gradients are clipped too, else Lightning clips them in place."""
    if algorithm == GradClipAlgorithmType.NORM and clip_by_norm(scaler, optimizer, clip_val) is not None:
        return True
    unscale(scaler, optimizer)
    return False


def unscale(scaler: LossScaler | None, optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale and move them to masters, whose gradients the parameters then show."""
    _refuse_copies(optimizer)
    if scaler is not None:
        scaler.unscale(optimizer)
    if (registry := registry_of(optimizer)) is not None:  # those that were assigned since an earlier call too
        masters_step.move_grads(registry)
    show_master_grads(optimizer)


def unscale_or_zero(scaler: LossScaler | None, optimizer: Optimizer) -> None:
    """Unscale the gradients; zero those of a step that will be skipped, so that clipping sees finite numbers."""
    unscale(scaler, optimizer)
    if scaler is None or not scaler.found_inf(optimizer):
        return
    for param in main_params(optimizer):
        if param.grad is not None:
            param.grad.zero_()


def scaled_step(
    plugin: private.EitherPrecision,
    scaler: LossScaler,
    optimizer: Any,
    model: LightningModule | None,
    closure: Callable[[], object] | None,
    kwargs: dict[str, object],
) -> Any:
    """Run the closure, unscale, let the Trainer clip, then step, or skip if a gradient is not finite."""
    if isinstance(optimizer, LBFGS):
        does, remedy = "scales the loss", "Use a bf16 precision"
        if not scaler.scales_loss:
            does, remedy = "skips steps (`skip_nonfinite=True`)", "Leave `skip_nonfinite` out"
        raise MisconfigurationException(
            f"`precision={plugin.precision!r}` {does}, and LBFGS evaluates the closure many times per step: they do not"
            f" go together. {remedy}, or use another optimizer."
        )
    result = None if closure is None else closure()
    if model is None:
        scaler.step(optimizer, **kwargs)
        return result
    no_gradients = result is None and model.automatic_optimization  # training_step returned None
    if not no_gradients:
        scaler.unscale(optimizer, defer=not private.sees_gradients(model))
    show_master_grads(optimizer)
    private.after_closure(plugin, model, optimizer)  # the Trainer's hooks and clipping
    if no_gradients:
        return result
    output = scaler.step(optimizer, **kwargs)
    trainer = model.trainer
    scale = {"lowprec/loss_scale": scaler.scale} if scaler.scales_loss else {}
    if private.logs_this_step(trainer):
        private.log_metrics(trainer, {**scale, "lowprec/skipped_steps": float(scaler.skipped_steps)})
    return output
