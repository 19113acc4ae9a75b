"""Private names of Lightning that this package uses."""

from __future__ import annotations


def moved() -> list[str]:
    """Return the private names that the installed Lightning no longer has, in words; empty on supported versions."""
    return []
