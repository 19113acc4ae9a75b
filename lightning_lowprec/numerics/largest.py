"""The largest absolute value of a weight, noted by the optimizer's kernel that wrote the weight.

Whoever encodes a weight needs this value first, and would read the whole weight for it. It is a hint: a write that
nobody sees makes it wrong, so that code that uses it compares it with what it finds.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor

from lightning_lowprec.private.torch import version_of

_ATTRIBUTE: Final = "lowprec_largest"


@final
class Largest:
    """The hint of one weight."""

    def __init__(self, weight: Tensor) -> None:
        self.value = torch.zeros((), device=weight.device)
        """() float32, not negative or NaN."""
        self._version = -1

    def note(self, weight: Tensor) -> None:
        """Note that ``value`` is that of ``weight`` now."""
        self._version = version_of(weight)

    def holds_for(self, weight: Tensor) -> bool:
        """Return whether no write to ``weight`` was seen since :meth:`note`."""
        return self._version == version_of(weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the hint out of copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the hint out of pickles."""
        return type(None), ()


def asked(weight: Tensor) -> Largest | None:
    """Return the hint that a kernel is to write, if somebody has asked for it."""
    hint: Largest | None = vars(weight).get(_ATTRIBUTE)
    return hint if hint is not None and hint.value.device == weight.device else None


def largest(weight: Tensor) -> Tensor | None:
    """Return the hint of a weight, () float32, or None if there is none; ask for it from now on."""
    hint = asked(weight)
    if hint is None:
        setattr(weight, _ATTRIBUTE, Largest(weight))
        return None
    return hint.value if hint.holds_for(weight) else None
