"""A training that is stopped by its own clock, with the validation loss beside steps and seconds.

The clock runs while training steps run, and stands while the loss is validated. The first chunk of steps compiles, so
these steps count with the median time of all later steps. One run gives two readings: the loss at a step, and the loss
at a second. A loss that is not finite ends the run.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_lane import measure
from benchmarks.gpu_lane.corpus import Corpus
from benchmarks.gpu_lane.item import stage
from benchmarks.gpu_lane.running import Batch, Running
from benchmarks.gpu_lane.values import values_exist


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a run is, and how often it is looked at."""

    seconds: float
    """Of training."""
    steps: int | None = None
    """At most, for toy sizes and where no time passes."""
    chunk: int = 10
    """Steps between two looks at the clock, which wait for the device."""
    every: int = 20
    """Steps between validations; a multiple of ``chunk``."""
    learning_rate: float = 6e-4
    warm_up: int = 100
    """Steps in which the learning rate rises; it is constant after them, so that a run can be stopped anywhere."""
    until: float = math.inf
    """When a run ends in any case, by ``time.monotonic``."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up)


class Windows:
    """Batches of tokens that lie on the device, so that no loader is measured.

    Windows do not overlap, and all are read once, in an order that ``seed`` gives, before any is read again.
    """

    def __init__(self, corpus: Corpus, *, sequence: int, batch: int, val_batches: int, seed: int, device: torch.device):
        self._sequence, self._batch, self._seed, self._device = sequence, batch, seed, device
        self._train, self._val = (
            torch.from_numpy(tokens.astype(np.int32)).to(device) for tokens in (corpus.train, corpus.val)
        )
        self.batches_per_epoch = self._count(self._train) // batch
        wanted, found = val_batches * batch, self._count(self._val)
        if not self.batches_per_epoch or found < wanted:
            raise ValueError(f"the text is too short: {len(corpus.train)} and {len(corpus.val)} tokens")
        starts = torch.arange(wanted) * found // wanted * sequence
        self._val_starts = [starts[i : i + batch].to(device) for i in range(0, wanted, batch)]
        self._epoch: int | None = None
        self._starts = starts
        self._offsets = torch.arange(sequence + 1, device=device)

    def _count(self, tokens: Tensor) -> int:
        return (len(tokens) - 1) // self._sequence

    def training(self, step: int) -> Batch:
        """Return the batch of a step: (B, T) tokens and targets."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1000 * self._seed + epoch)
            order = torch.randperm(self._count(self._train), generator=generator)
            self._epoch, self._starts = epoch, (order * self._sequence).to(self._device)
        return self._at(self._train, self._starts[index * self._batch :][: self._batch])

    def validation(self) -> list[Batch]:
        """Return the batches of validation, which are the same for all seeds."""
        return [self._at(self._val, starts) for starts in self._val_starts]

    def _at(self, tokens: Tensor, starts: Tensor) -> Batch:
        rows = tokens[starts[:, None] + self._offsets].long()
        return rows[:, :-1], rows[:, 1:]


@dataclass
class Clock:
    """The time of training by chunks of steps."""

    chunks: list[tuple[int, float]] = field(default_factory=list)
    """Steps, and the seconds that they took."""

    def add(self, steps: int, seconds: float) -> None:
        self.chunks.append((steps, seconds))

    @property
    def per_step(self) -> float:
        """The median over all chunks but the first; of the first if there is no other."""
        return statistics.median(seconds / steps for steps, seconds in self.chunks[1:] or self.chunks)

    @property
    def later(self) -> float:
        """Seconds of all chunks but the first."""
        return sum(seconds for _, seconds in self.chunks[1:])

    @property
    def first(self) -> float:
        """Seconds that the first chunk counts for."""
        return self.chunks[0][0] * self.per_step

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return self.first + self.later


def train(running: Running, data: Windows, schedule: Schedule, device: torch.device) -> dict[str, Any]:
    """Train, and return the curve and every time."""
    start, clock = time.perf_counter(), Clock()
    points: list[tuple[int, float, float]] = []
    losses: list[float] = []
    step, validation_s = 0, 0.0
    while True:
        count = min(schedule.chunk, (schedule.steps or step + schedule.chunk) - step)
        taken: list[Tensor] = []
        clock.add(count, measure.seconds(lambda: taken.append(_chunk(running, data, schedule, step, count)), device))  # noqa: B023
        losses.append(float(taken[0]))
        step += count
        cut_short = time.monotonic() > schedule.until
        timed = len(clock.chunks) > 1  # the first chunk alone is compilation for the most part
        over = cut_short or (timed and clock.seconds >= schedule.seconds) or step == schedule.steps
        if over or step % schedule.every == 0:
            found: list[float] = []
            validation_s += measure.seconds(lambda: found.append(_validate(running, data)), device)  # noqa: B023
            points.append((step, clock.later, found[0]))
            stage(f"step {step}", points=points, clock_s=clock.seconds)
            diverged = values_exist() and not math.isfinite(found[0])
            if over or diverged:
                break
    first = clock.first
    return {
        "points": [(at, first + later, loss) for at, later, loss in points],
        "losses": losses, "steps": step, "training_s": clock.seconds, "ms": clock.per_step * 1e3,
        "compile_s": clock.chunks[0][1] - first, "validation_s": validation_s, "diverged": diverged,
        "wall_s": time.perf_counter() - start, "cut_short": cut_short and not diverged,
    }  # fmt: skip


def _chunk(running: Running, data: Windows, schedule: Schedule, first: int, count: int) -> Tensor:
    """Take ``count`` steps; the mean of their losses, not waited for."""
    losses = []
    for step in range(first, first + count):
        for group in running.optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        losses.append(running.step([data.training(step)]))
    return torch.stack(losses).mean()


def _validate(running: Running, data: Windows) -> float:
    """Return the mean loss in the precision of the contender, as Lightning's Trainer validates."""
    running.model.eval()
    with torch.no_grad():
        loss = torch.stack([running.forward(batch).float() for batch in data.validation()]).mean()
    running.model.train()
    return float(loss)
