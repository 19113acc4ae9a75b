"""Count the memory of tensors that are made while a step runs, by what the memory is for.

torch's ``MemTracker`` counts the same. This meter also keeps the peak of every stretch of a step, which
`simulation.py` needs, and counts what kernels of CUDA take inside an operation and no operation shows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import Tensor

from lightning_lowprec.private.fake_gpu import FLASH_BACKWARD, DispatchMode, is_fake, tensors_of

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = "weights", "gradients", "state", "activations", "temporaries"
CATEGORIES: Final = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES)
ROUNDED_TO: Final = 512
"""torch's allocator rounds every tensor up to a multiple of so many bytes."""
Peaks = dict[str, dict[str, int]]
"""By stretch: the bytes by category, when the sum was largest."""
_CUBLAS_ON_HOPPER, _CUBLAS_ELSEWHERE = 32 << 20, (8 << 20) + (128 << 10)  # bytes per thread, after its first product
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32  # flash attention rounds lengths and head dimensions up to these
_FLOAT32: Final = 4


def cublas(capability: tuple[int, int]) -> int:
    """Return the bytes that torch keeps for cuBLAS: for the thread of the forward, and that of the backward."""
    return 2 * (_CUBLAS_ON_HOPPER if capability[0] == 9 else _CUBLAS_ELSEWHERE)


@final
class MemoryMeter(DispatchMode):  # type: ignore[misc]
    """Count the bytes of all tensors that live, while active.

    A tensor that is made belongs to the category ``making``, until :meth:`mark` says otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.making = TEMPORARIES
        self.stretch = ""
        self.operation = ""
        """The operation that ran last, in words."""
        self.peaks: Peaks = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._pauses = 0
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def begin(self, stretch: str, *, making: str) -> None:
        """Begin a stretch of the step."""
        self.stretch, self.making = stretch, making
        self._note(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the context; an error ends the simulation."""
        self._pauses += 1
        yield
        self._pauses -= 1

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what the memory of ``tensors`` is for."""
        for tensor in tensors:
            self._count(tensor)
            if is_fake(tensor):
                self._move(id(tensor.untyped_storage()), category)
        self._note(0)

    def mark_living(self, category: str, *, but: Iterable[str]) -> None:
        """Say that whatever lives now, outside of the categories ``but``, is ``category``."""
        for key, (_, before, _) in list(self._storages.items()):
            if before not in but:
                self._move(key, category)

    def _move(self, key: int, category: str) -> None:
        reference, before, size = self._storages[key]
        self._now[before] -= size
        self._now[category] += size
        self._storages[key] = reference, category, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what the operation has made."""
        self.operation = str(func)
        out = func(*args, **(kwargs or {}))
        if self._pauses:
            return out
        for tensor in tensors_of(out):
            self._count(tensor)
        if func is FLASH_BACKWARD:
            self._note(_inside_flash_backward(*args))
        return out

    def resized(self, storage: Any) -> None:
        """Count a storage whose size has changed."""
        if id(storage) in self._storages:
            reference, category, before = self._storages[id(storage)]
            size = _rounded(storage.nbytes())
            self._storages[id(storage)] = reference, category, size
            self._add(category, size - before)

    def _count(self, tensor: Tensor) -> None:
        storage: Any = tensor.untyped_storage() if is_fake(tensor) else None
        if storage is None or id(storage) in self._storages:
            return
        size, key = _rounded(storage.nbytes()), id(storage)

        def forget(_: Any) -> None:
            _, category, size = self._storages.pop(key)
            self._add(category, -size)

        self._storages[key] = weakref.ref(storage, forget), self.making, size
        self._add(self.making, size)

    def _add(self, category: str, size: int) -> None:
        self._now[category] += size
        if size > 0:
            self._note(0)

    def _note(self, extra: int) -> None:
        peak = self.peaks.get(self.stretch)
        if peak is None or sum(self._now.values()) + extra >= sum(peak.values()):
            self.peaks[self.stretch] = {**self._now, TEMPORARIES: self._now[TEMPORARIES] + extra}


def _rounded(size: int) -> int:
    return math.ceil(size / ROUNDED_TO) * ROUNDED_TO


def _inside_flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """The gradient of the query in float32, one number per row, and per query head the gradients of key and value."""
    batch, heads, length, width = query.shape
    rows = -(-length // _FLASH_ROWS) * _FLASH_ROWS
    columns = -(-width // _FLASH_COLUMNS) * _FLASH_COLUMNS
    of_query = _FLOAT32 * batch * heads * rows * (columns + 1)
    of_others = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * width * key.element_size()
    return of_query + of_others
