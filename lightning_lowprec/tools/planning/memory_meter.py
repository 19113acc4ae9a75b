"""Count the memory of tensors that are made while a step runs, by what the memory is for.

torch's ``MemTracker`` counts the same. This meter also keeps the peak of every stretch of a step, which
`extrapolation.py` needs, and counts what kernels of CUDA take inside an operation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import Tensor

from lightning_lowprec.private.fake_gpu import DispatchMode, is_fake, tensors_of
from lightning_lowprec.tools.planning.kernel_memory import inside

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = "weights", "gradients", "state", "activations", "temporaries"
CATEGORIES: Final = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES)
ROUNDED_TO: Final = 512
"""torch's allocator rounds every tensor up to a multiple of so many bytes."""
Peaks = dict[str, dict[str, int]]
"""By stretch: the bytes by category, when the sum was largest."""


@final
class MemoryMeter(DispatchMode):  # type: ignore[misc]
    """Count the bytes of all tensors that live, while active.

    A tensor that is made belongs to the category ``making``, until :meth:`mark` says otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.making: str = TEMPORARIES
        self.stretch: str = ""
        self.operation: str = ""
        """The operation that ran last, in words."""
        self.peaks: Peaks = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._pauses = 0
        self._known: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def begin(self, stretch: str, *, making: str) -> None:
        """Begin a stretch of the step."""
        self.stretch, self.making = stretch, making
        self._note(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the context."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what the memory of ``tensors`` is for."""
        for tensor in tensors:
            self._count(tensor)
            if not is_fake(tensor):
                continue
            storage = tensor.untyped_storage()
            reference, before, size = self._known[id(storage)]
            self._now[before] -= size
            self._now[category] += size
            self._known[id(storage)] = reference, category, size
        self._note(0)

    def mark_living(self, category: str, *, but: Iterable[str]) -> None:
        """Say that whatever lives now, outside of the categories ``but``, is ``category``."""
        kept = set(but)
        for key, (reference, before, size) in list(self._known.items()):
            if before not in kept:
                self._now[before] -= size
                self._now[category] += size
                self._known[key] = reference, category, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what the operation has made."""
        self.operation = str(func)
        out = func(*args, **(kwargs or {}))
        if self._pauses:
            return out
        if isinstance(out, Tensor):
            self._count(out)
        elif isinstance(out, tuple | list):
            for tensor in tensors_of(out):
                self._count(tensor)
        extra = inside(func, args)
        if extra:
            self._note(extra)
        return out

    def resized(self, storage: Any) -> None:
        """Count a storage whose size has changed."""
        if id(storage) in self._known:
            reference, category, before = self._known[id(storage)]
            size = _rounded(storage.nbytes())
            self._known[id(storage)] = reference, category, size
            self._add(category, size - before)

    def _count(self, tensor: Tensor) -> None:
        if not is_fake(tensor):
            return
        storage: Any = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        size, key = _rounded(storage.nbytes()), id(storage)

        def forget(_: Any) -> None:
            known = self._known.pop(key)
            self._add(known[1], -known[2])

        self._known[key] = weakref.ref(storage, forget), self.making, size
        self._add(self.making, size)

    def _add(self, category: str, size: int) -> None:
        self._now[category] += size
        self._total += size
        if size > 0:
            self._note(0)

    def _note(self, extra: int) -> None:
        peak = self.peaks.get(self.stretch)
        if peak is None or self._total + extra >= sum(peak.values()):
            self.peaks[self.stretch] = {**self._now, TEMPORARIES: self._now[TEMPORARIES] + extra}


def _rounded(size: int) -> int:
    return math.ceil(size / ROUNDED_TO) * ROUNDED_TO
