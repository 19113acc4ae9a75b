"""The cost of a precision in optimizer steps: how many more steps reach the baseline's training loss.

The training loss of a baseline is noisy. Its smoothed curve is the least-squares line of the loss over the logarithm of
the step, through the second half of the run:

    loss = a - b ln(step)        a precision that ends d higher is where the baseline was at step S exp(-d / b),
                                 so the precision needs exp(d / b) - 1 more steps

The difference d is that of the mean loss of the last tenth of the steps. Both runs read the same batches there, so the
noise of the batches is in no difference.
"""

from __future__ import annotations

import math
from typing import final

import torch

from lightning_lowprec.tools.compare.result import PrecisionResult

FEWEST_STEPS = 20
"""Training batches that a run needs for a line."""
_STANDARD_ERRORS = 2.0  # a curve that falls by less is flat
_LONGEST = math.log(2)  # the line covers the second half of the run


@final
class NoStepsError(ValueError):
    """The cost in steps cannot be measured; the message says why."""


def more_steps(result: PrecisionResult, baseline: PrecisionResult) -> float:
    """Return the share of steps that a precision needs beyond the baseline's: 0.008 is 0.8 % more steps.

    Raises:
        NoStepsError: the run is short, the baseline's loss is flat, or the difference is too large for its line.
    """
    ours, theirs = result.final_train, baseline.final_train
    count = len(baseline.train_losses)
    if count < FEWEST_STEPS or ours is None or theirs is None:
        raise NoStepsError(f"the runs have {count} steps, and {FEWEST_STEPS} are needed")
    slope, error = fall(baseline.train_losses)
    if slope <= _STANDARD_ERRORS * error:
        raise NoStepsError("the baseline's training loss is flat: over the second half it falls by less than its noise")
    exponent = (ours - theirs) / slope
    if abs(exponent) > _LONGEST:
        raise NoStepsError("the training losses differ by more than the baseline's loss falls in the second half")
    return math.expm1(exponent)


def fall(losses: list[float]) -> tuple[float, float]:
    """Return how fast the loss falls with the logarithm of the step in the second half, and the standard error."""
    first = len(losses) // 2
    y = torch.tensor(losses[first:], dtype=torch.float64)  # [S / 2]
    x = torch.arange(first + 1, len(losses) + 1, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    spread = x @ x
    slope = (x @ y) / spread
    residual = y - slope * x
    error = (residual @ residual / (len(y) - 2) / spread).sqrt()
    return -float(slope), float(error)
