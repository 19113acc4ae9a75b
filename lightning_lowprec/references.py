"""Weak references to modules and optimizers that the user owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class WeakList(Generic[T]):
    """Objects that somebody else keeps alive; copies and pickles of the list are empty."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(value) for value in values]

    def add(self, value: T) -> None:
        """Put ``value`` at the end."""
        self._references = [weakref.ref(other) for other in (*self, value)]

    def __iter__(self) -> Iterator[T]:
        return iter([value for value in (reference() for reference in self._references) if value is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reduce__(self) -> tuple[type[WeakList[T]], tuple[()]]:
        return type(self), ()


@final
class WeakNumbers(weakref.WeakKeyDictionary[T, int]):
    """A number for each object that somebody else keeps alive; a pickle of it is empty."""

    def __reduce__(self) -> tuple[type[WeakNumbers[T]], tuple[()]]:
        return type(self), ()
