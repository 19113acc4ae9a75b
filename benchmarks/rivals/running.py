"""A contender that is set up: a model, its optimizer, and how to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.models import Llama, Loss, Shape, build

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every contender is given."""

    shape: Shape
    device: torch.device
    compile: bool = True
    """Whether contenders that compile do so."""
    optimizer: str = "AdamW"
    """``"AdamW"`` (torch's fused one), or a low-bit one of torchao: ``"AdamW8bit"``, ``"AdamW4bit"`` ..."""

    weights: torch.dtype = torch.float32
    """Of the model before anyone sets it up."""

    loss: Loss = "logits"

    def model(self) -> Llama:
        model = build(self.shape, self.device).to(self.weights)
        model.loss = self.loss
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(model.parameters(), fused=True, lr=LEARNING_RATE)
        import torchao.optim

        maker = getattr(torchao.optim, self.optimizer)
        optimizer: torch.optim.Optimizer = maker(model.parameters(), lr=LEARNING_RATE)
        return optimizer


@dataclass(kw_only=True)
class Running:
    """Ready to train."""

    model: nn.Module
    """Called with tokens and targets, returns the loss; wrapped by whoever wraps."""
    bare: nn.Module
    """The model inside."""
    optimizer: Any
    backward: Callable[[Tensor], Any] = Tensor.backward
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around every forward."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the setup has to say, e.g. the plan's summary."""

    def forward(self, batch: Batch) -> Tensor:
        """The loss of one micro-batch."""
        with self.context():
            loss: Tensor = self.model(*batch)
        return loss

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over these micro-batches; the last one's loss, not waited for."""
        for batch in batches:
            loss = self.forward(batch)
            self.backward(loss / len(batches) if len(batches) > 1 else loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def compile_blocks(model: Llama, job: Job) -> None:
    """What a user does by hand: every block compiled in place; equal blocks share their code."""
    if job.compile:
        for block in model.layers:
            block.compile()
