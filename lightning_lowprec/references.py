"""Weak references to modules and optimizers that the user owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def alive(references: Iterable[weakref.ref[T]]) -> list[T]:
    """Return the objects that still exist."""
    return [value for value in (reference() for reference in references) if value is not None]
