"""Record the losses, times and memory of a training from outside the model, and send its progress to the parent.

A training runs in a process that the parent starts. The process sends messages over its stdout, where the user's model
may print too.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

MARK = "\x1elowprec "
"""Starts a message that runs to the end of its line; 0x1e is ASCII's record separator (cf. RFC 7464)."""
CUDA_MEMORY = "most bytes allocated by torch on the GPU during fit (torch.cuda.max_memory_allocated)"
CPU_MEMORY = "peak resident memory of the process during fit, less what was resident just before fit"
UNKNOWN_MEMORY = "not measured: this system has no /proc to read it from"


class Recorder(L.Callback):
    """Record the loss and time of every step, the metric of every validation, and the peak memory."""

    def __init__(self, val_metric: str, max_steps: int) -> None:
        self.val_metric = val_metric
        self.max_steps = max_steps
        self.train_losses: list[float] = []
        self.step_seconds: list[float] = []
        self.val_steps: list[int] = []
        self.val_losses: list[float] = []
        self.device = torch.device("cpu")
        self._resident: int | None = None
        self._started = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.device = trainer.strategy.root_device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._resident = _forget_peak()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = _loss(outputs)  # reading the loss waits for the GPU, so the time includes the optimizer step
        self.step_seconds.append(time.perf_counter() - self._started)
        self.train_losses.append(loss)
        send(step=trainer.global_step, loss=loss)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {len(self.train_losses)}")
        if trainer.global_step >= self.max_steps:
            trainer.should_stop = True  # lets Lightning validate after the last step, wherever the interval falls

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
        """Return the records so far, as fields of ``PrecisionResult``."""
        peak, kind = self._peak_memory()
        return {
            "train_losses": self.train_losses,
            "step_seconds": self.step_seconds,
            "val_steps": self.val_steps,
            "val_losses": self.val_losses,
            "peak_memory": peak,
            "memory_kind": kind,
        }

    def _peak_memory(self) -> tuple[int | None, str]:
        """Return bytes and their meaning; the bytes are None if nothing measured them."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), CUDA_MEMORY
        if self._resident is None:
            return None, UNKNOWN_MEMORY
        return _process_memory("VmHWM") - self._resident, CPU_MEMORY


def send(**message: Any) -> None:
    """Write one message to stdout in one piece."""
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def receive(line: str) -> tuple[str, dict[str, Any] | None]:
    """Split a line of a training's stdout: the text that the user's code printed, and our message or None."""
    text, mark, message = line.partition(MARK)
    if not mark:
        return line, None
    try:
        return text, dict(json.loads(message))
    except ValueError:  # another thread wrote into the middle of the message
        return line, None


def _loss(outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        raise ValueError(
            "training_step returned no loss; expected a tensor or a dict with 'loss' (with manual optimization too),"
            " because the loss is what is compared."
        )
    return float(loss)


def _forget_peak() -> int | None:
    """Reset the peak of the process's memory and return the bytes that are resident now; None without /proc."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets VmHWM to the current resident size
        return _process_memory("VmRSS")
    except OSError:
        return None


def _process_memory(field: str) -> int:
    status = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{status} has no {field}")
    return int(found[1]) * 1024
