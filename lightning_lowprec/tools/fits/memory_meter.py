"""Count the memory of tensors that are made while a step runs, by what it is for, with the peak of every stretch.

torch's ``MemTracker`` counts the same, and keeps no peaks of stretches.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, final, get_args

from torch import Tensor, UntypedStorage

from lightning_lowprec.private.torch import tensors_of
from lightning_lowprec.tools.fits.fake_gpu import DispatchMode, is_fake

Category = Literal["weights", "gradients", "state", "activations", "temporaries"]
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
Peaks = dict[str, dict[Category, int]]
"""By stretch: the bytes by category, when the sum was largest."""


@final
class MemoryMeter(DispatchMode):  # type: ignore[misc]
    """Count the bytes of all tensors that live, while active; what is made belongs to ``making`` until :meth:`mark`."""

    def __init__(self) -> None:
        super().__init__()
        self.making: Category = "temporaries"
        self.stretch = ""
        self.operation = ""  # that ran last, in words
        self.peaks: Peaks = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._pauses = 0
        self._storages: dict[int, tuple[weakref.ref[object], Category, int]] = {}

    def begin(self, stretch: str, *, making: Category) -> None:
        """Begin a stretch of the step."""
        self.stretch, self.making = stretch, making
        self._note()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the context; an error ends the simulation."""
        self._pauses += 1
        yield
        self._pauses -= 1

    def mark(self, tensors: Iterable[object], category: Category) -> None:
        """Say what the memory of ``tensors`` is for."""
        for tensor in filter(is_fake, tensors):
            self._count(tensor)
            self._move(id(tensor.untyped_storage()), category)
        self._note()

    def mark_living(self, category: Category, *, but: Collection[Category]) -> None:
        """Say that whatever lives now, outside of the categories ``but``, is ``category``."""
        for key, (_, before, _) in list(self._storages.items()):
            if before not in but:
                self._move(key, category)

    def _move(self, key: int, category: Category) -> None:
        reference, before, size = self._storages[key]
        self._now[before] -= size
        self._now[category] += size
        self._storages[key] = reference, category, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operation = str(func)
        out = func(*args, **(kwargs or {}))
        if not self._pauses:
            for tensor in filter(is_fake, tensors_of(out)):
                self._count(tensor)
        return out

    def resized(self, storage: UntypedStorage) -> UntypedStorage:
        """Count a storage whose size has changed, and return the storage."""
        if id(storage) in self._storages:
            reference, category, before = self._storages[id(storage)]
            self._storages[id(storage)] = reference, category, storage.nbytes()
            self._add(category, storage.nbytes() - before)
        return storage

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return

        def forget(_: object) -> None:
            _, category, size = self._storages.pop(key)
            self._add(category, -size)

        self._storages[key] = weakref.ref(storage, forget), self.making, storage.nbytes()
        self._add(self.making, storage.nbytes())

    def _add(self, category: Category, size: int) -> None:
        self._now[category] += size
        if size > 0:
            self._note()

    def _note(self) -> None:
        peak = self.peaks.get(self.stretch)
        if peak is None or sum(self._now.values()) >= sum(peak.values()):
            self.peaks[self.stretch] = dict(self._now)
