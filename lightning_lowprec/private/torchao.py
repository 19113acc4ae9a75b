"""Private names of torchao that this package uses."""

from __future__ import annotations


def moved() -> list[str]:
    """Return the private names that the installed torchao no longer has, in words; empty on supported versions."""
    return []
