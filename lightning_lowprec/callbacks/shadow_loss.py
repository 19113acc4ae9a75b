"""Compute the loss of a batch with converted layers in high precision: what FP8 changes in the loss of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.callbacks.sampling import named_layers
from lightning_lowprec.conversion import backends
from lightning_lowprec.numerics.casts import HIGH, LayerNumerics
from lightning_lowprec.private.either import LightningModule, Trainer, is_param_in_hook_signature
from lightning_lowprec.private.names import replaced

_REMEDY: Final = "Leave `shadow_loss` out."


def shadow_loss(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss, () on the device, of ``training_step`` in high precision, without gradients and logging."""
    two = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)  # by position, as the Trainer does
    arguments = (batch, batch_idx) if two else (batch,)
    devices = [trainer.strategy.root_device] if trainer.strategy.root_device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), in_high_precision(module), ExitStack() as silent:
        for name in ("log", "log_dict"):
            silent.enter_context(replaced(module, name, lambda *args, **kwargs: None))
        output = trainer.strategy.training_step(*arguments)
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise RuntimeError(f"`shadow_loss=True` needs a loss, and `training_step` returned {loss!r}. {_REMEDY}")
    return loss.detach().float()


@contextmanager
def in_high_precision(model: nn.Module) -> Iterator[None]:
    """Run the converted layers of ``model`` by torch's own linear product, in the dtype of autocast."""
    with ExitStack() as changed:
        for fqn, layer in named_layers(model):
            backend = backends.owner(layer)
            if backend is None:
                continue
            numerics = backend.numerics(layer) if isinstance(layer, nn.Linear) else "it is no linear layer"
            if not isinstance(numerics, LayerNumerics) and numerics != HIGH:
                raise RuntimeError(f"`shadow_loss=True` cannot run {fqn!r} in high precision: {numerics}. {_REMEDY}")
            changed.enter_context(replaced(layer, "forward", partial(_linear, fqn, layer, backend)))
        yield


def _linear(fqn: str, layer: nn.Module, backend: backends.Backend, input: Tensor) -> Tensor:
    numerics = backend.numerics(layer)
    if numerics == HIGH:  # by demotion, or in a phase of a schedule
        return cast(Tensor, type(layer).forward(layer, input))
    weight = numerics.values if isinstance(numerics, LayerNumerics) else None
    if weight is None or isinstance(weight, DTensor):
        raise RuntimeError(
            f"`shadow_loss=True` cannot run {fqn!r} in high precision: its weight is gathered as float8, or cut. Use"
            f" `FSDP2Strategy(fp8_all_gather=False)`, or leave `shadow_loss` out."
        )
    bias: Any = layer.bias
    return F.linear(input, weight, bias)
