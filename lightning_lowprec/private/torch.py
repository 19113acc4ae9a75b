"""Private names of PyTorch that this package uses."""

from __future__ import annotations


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return []
