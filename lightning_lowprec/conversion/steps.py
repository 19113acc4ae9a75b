"""Know whether a weight is the one that was quantised: kept codes of a stale weight give wrong gradients silently.

A weight is the same if all of these are: the Parameter; its place in memory (``weight.data = other`` and
``vector_to_parameters`` change no version); its version; the count of optimizer steps, since a kernel may change no
version (a weight that does not train outlasts the steps); and the mode, training or evaluation, because averaged
weights, which change no version, may be in place during evaluation. The only change that cannot be seen is a write in
place through ``weight.data``, between two micro-batches.
"""

import functools
from typing import final

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_lowprec.private.torch import version_of
from lightning_lowprec.private.torch_optimizers import sees_no_masters

Seen = tuple[int, ...]


@final
class Steps:
    """The steps of all optimizers of this process."""

    count = 0


@sees_no_masters
def count_step(*_: object) -> None:
    """Note that an optimizer made a step."""
    Steps.count += 1


@functools.cache
def watch() -> None:
    """Count steps from now on; whoever keeps codes calls this."""
    register_optimizer_step_post_hook(count_step)


def seen(weight: Tensor, *, training: bool, steps: bool = True) -> Seen:
    """Return a value that changes when ``weight`` may have changed; ``steps``: whether a step may change it."""
    return id(weight), weight.data_ptr(), version_of(weight), Steps.count if steps else -1, training
