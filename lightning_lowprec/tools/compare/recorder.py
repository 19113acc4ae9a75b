"""Records what a training does, from outside the model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from lightning_lowprec.tools.compare.memory import PeakMemory
from lightning_lowprec.tools.compare.progress import send


class Recorder(L.Callback):
    """Loss and time of every step, the metric of every validation, peak memory; reports progress to the parent."""

    def __init__(self, val_metric: str, max_steps: int) -> None:
        self.val_metric = val_metric
        self.max_steps = max_steps
        self.train_losses: list[float] = []
        self.step_seconds: list[float] = []
        self.val_steps: list[int] = []
        self.val_losses: list[float] = []
        self.device = torch.device("cpu")
        self._memory = PeakMemory(self.device)
        self._started = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.device = trainer.strategy.root_device
        self._memory = PeakMemory(self.device)
        self._memory.start()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = _loss(outputs)  # reading it waits for the GPU, so the time includes the optimizer step
        self.step_seconds.append(time.perf_counter() - self._started)
        self.train_losses.append(loss)
        send(step=trainer.global_step, loss=loss)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {len(self.train_losses)}")
        if trainer.global_step >= self.max_steps:
            trainer.should_stop = True  # makes Lightning validate after the last step, wherever the interval falls

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        if self.val_metric not in metrics:
            raise ValueError(
                f"`val_metric={self.val_metric!r}` was not logged; logged: {', '.join(sorted(metrics)) or 'nothing'}."
                " Name one of these, or log it in validation_step."
            )
        value = float(metrics[self.val_metric])
        self.val_steps.append(len(self.train_losses))
        self.val_losses.append(value)
        send(val=value)

    def figures(self) -> dict[str, Any]:
        """What was recorded so far, as fields of `PrecisionResult`."""
        peak, kind = self._memory.read()
        return {
            "train_losses": self.train_losses,
            "step_seconds": self.step_seconds,
            "val_steps": self.val_steps,
            "val_losses": self.val_losses,
            "peak_memory": peak,
            "memory_kind": kind,
        }


def _loss(outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        raise ValueError(
            "training_step returned no loss; expected a tensor or a dict with 'loss' (with manual optimization too),"
            " because the loss is what is compared."
        )
    return float(loss)
