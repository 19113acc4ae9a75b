"""When a layer's FP8 weight may be used again: between two optimizer steps, by the next micro-batch.

Transformer Engine quantises a weight at every forward unless it is told ``is_first_microbatch``. True quantises and
keeps the result, False uses what was kept, None quantises for this call. A kept weight that is stale trains on wrongly
without an error, so it counts as fresh only if nobody is known to have changed it: the same Parameter, at the same
place in memory (``weight.data = other`` bumps no version, nor does ``vector_to_parameters``), at the same version, no
optimizer has stepped since, in case its kernel bumps no version, and no ``eval()`` was called. (A frozen weight
outlasts the steps.) What cannot be seen is a write in place through ``weight.data``.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


@final
class Steps:
    """How often any optimizer of this process has stepped."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Torch's hook behind every ``step``."""
        self.count += 1


STEPS = Steps()
register_optimizer_step_post_hook(STEPS)


@final
class WeightCache:
    """The answers of one layer; it learns from its own use whether keeping pays.

    Without accumulation no weight is used twice, nothing is kept, and no memory is spent: 2 bytes per parameter for
    codes and their transpose otherwise.

    Args:
        always: keep whatever is quantised, and use it in evaluation too (FP8 parameters).
    """

    def __init__(self, *, always: bool = False) -> None:
        self.always = always
        self._seen: tuple[int, ...] | None = None
        self._kept = False
        self._used_again = False

    def is_first_microbatch(self, weight: Tensor, *, training: bool = True) -> bool | None:
        """For a forward with gradients, or any if weights are always kept; see above.

        Args:
            weight: the layer's.
            training: whether the layer is in training mode. Averaged weights are put in place through ``data``, which
                bumps no version, when a model begins to evaluate, and taken away when it ends.
        """
        steps = -1 if self.always and not weight.requires_grad else STEPS.count
        now = (id(weight), weight.data_ptr(), weight._version, steps, training)
        if now != self._seen:
            self._seen = now
            self._kept, self._used_again = self.always or self._used_again, False
            return True if self._kept else None
        self._used_again = True
        if self._kept:
            return False
        self._kept = True
        return True

    def forget(self) -> None:
        """The next forward quantises anew."""
        self._seen = None

    @property
    def pays(self) -> bool:
        """Whether the weight was used again since the last step; settable, so that a resumed run goes on as it was."""
        return self._used_again

    @pays.setter
    def pays(self, value: bool) -> None:
        self._used_again = value

    @property
    def is_idle(self) -> bool:
        """Whether what was kept for the last step is of no use to this one."""
        return not self._kept
