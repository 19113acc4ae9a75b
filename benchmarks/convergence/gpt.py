"""The demo's byte-level GPT with the learning rate of the other models: it falls to zero at the end."""

from __future__ import annotations

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from typing_extensions import override

from benchmarks.convergence.optimizer import adamw
from lightning_lowprec.tools.demo import ByteGPT


class DecayedGPT(ByteGPT):
    """The GPT of ``lowprec compare``.

    Args:
        steps: optimizer steps of the run.
        sizes: the arguments of :class:`ByteGPT`.
    """

    def __init__(self, steps: int, **sizes: float) -> None:
        super().__init__(**sizes)
        self.steps = steps

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adamw(self.parameters(), self.lr, self.steps)
