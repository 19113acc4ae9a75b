"""Decide when a layer's quantised weight may be used again: between two optimizer steps, by the next micro-batch.

Transformer Engine quantises a weight at every forward, unless the forward gets ``is_first_microbatch``:

    True    quantise the weight and keep the result
    False   use the result that was kept
    None    quantise the weight for this call

A kept weight that is stale gives wrong gradients without an error: `conversion/steps.py` says when a weight is the
same.
``eval()`` always has the weight quantised anew.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from lightning_lowprec.conversion.steps import Seen, seen, watch


@final
class WeightCache:
    """The choice of ``is_first_microbatch`` for one layer, which learns whether weights are used more than once.

    Without accumulation no weight is used twice: then nothing is kept and no memory is spent. Otherwise the codes and
    their transpose take 2 bytes per parameter. ``always`` keeps every quantised weight, for evaluation too.
    """

    def __init__(self, *, always: bool = False) -> None:
        watch()
        self.always = always
        self.used_again = False
        """Whether the weight was used more than once since the last step. A resumed run sets it."""
        self._seen: Seen | None = None
        self._kept = False

    def is_first_microbatch(self, weight: Tensor, *, training: bool = True) -> bool | None:
        """Return the argument for a forward with gradients, or for any forward if weights are always kept.

        The mode counts because averaged weights, which change no version, may be in place during evaluation.
        """
        now = seen(weight, training=training, steps=weight.requires_grad or not self.always)
        if now != self._seen:
            self._seen = now
            self._kept = self.always or self.used_again
            self.used_again = False
            return True if self._kept else None
        self.used_again = True
        if self._kept:
            return False
        self._kept = True
        return True

    def forget(self) -> None:
        """Have the next forward quantise the weight anew."""
        self._seen = None

    @property
    def is_idle(self) -> bool:
        """Whether a weight that is still stored is of no use to this step."""
        return not self._kept
