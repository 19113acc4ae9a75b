"""The figures of one training, and the verdict on a training beside that of the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WARMUP_STEPS = 5
"""First steps that the median step time leaves out: they allocate, compile and fill caches."""


@dataclass(kw_only=True)
class PrecisionResult:
    """The raw figures of one training, up to the failure if ``error`` is set."""

    name: str
    seed: int = 0
    train_losses: list[float] = field(default_factory=list)
    """One per training batch."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each training batch from its start until its loss is read, optimizer step included."""
    val_steps: list[int] = field(default_factory=list)
    """Training batches before each validation."""
    val_losses: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Most bytes that torch allocated on the GPU; None on a CPU."""
    device: str = ""
    on_cpu: bool = False
    notes: list[str] = field(default_factory=list)
    """Messages that the precision logged, e.g. how many layers it converted."""
    error: str | None = None

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the figures of one message of the training."""
        if "loss" in message:
            self.train_losses.append(message["loss"])
            self.step_seconds.append(message["seconds"])
        elif "val" in message:
            self.val_steps.append(len(self.train_losses))
            self.val_losses.append(message["val"])
        else:
            vars(self).update(message)

    @property
    def final_val(self) -> float | None:
        """The validation metric after the last step."""
        return self.val_losses[-1] if self.val_losses and self.error is None else None

    @property
    def final_train(self) -> float | None:
        """The mean training loss of the last tenth of the steps."""
        tail = self.train_losses[-max(1, len(self.train_losses) // 10) :]
        return statistics.fmean(tail) if tail else None

    @property
    def step_time(self) -> float | None:
        """The median time of a step in seconds, without the warm-up."""
        warmup = min(WARMUP_STEPS, len(self.step_seconds) // 2)
        return statistics.median(self.step_seconds[warmup:]) if self.step_seconds else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one precision; ``gap`` is the relative difference of its final metric from the baseline's."""

    ok: bool
    text: str
    gap: float | None = None


def judge(result: PrecisionResult, baseline: PrecisionResult, max_loss_gap: float) -> Verdict:
    """Judge a precision: it must train, and end with a finite metric within ``max_loss_gap`` of the baseline's."""
    if result.error is not None:
        return Verdict(ok=False, text="failed: " + result.error.strip().rpartition("\n")[2])
    value, reference = result.final_val, baseline.final_val
    if value is None:
        return Verdict(ok=False, text="no validation ran: expected training batches, validation_step, val_dataloader")
    if not math.isfinite(value):
        return Verdict(ok=False, text=f"final validation metric is {value}")
    if result is baseline:
        return Verdict(ok=True, text="baseline", gap=0.0)
    if reference is None or not math.isfinite(reference):
        return Verdict(ok=False, text=f"not judged: the baseline {baseline.name} has no finite result")
    gap = relative_gap(value, reference)
    if abs(gap) <= max_loss_gap:
        return Verdict(ok=True, text=f"within {100 * max_loss_gap:g}%", gap=gap)
    return Verdict(ok=False, text=f"off by more than {100 * max_loss_gap:g}%", gap=gap)


def relative_gap(value: float, reference: float) -> float:
    """Return the relative difference from ``reference``; a reference of 0 must be met almost exactly."""
    return (value - reference) / (abs(reference) or 1e-12)
