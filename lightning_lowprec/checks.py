"""Checks of arguments, with one wording: the field, the value that was given, the values that are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_choice(field: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ValueError if ``value`` is not one of ``allowed``, for example of the ``get_args`` of a ``Literal``."""
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {', '.join(map(str, choices))}.")


def check_integer(field: str, value: Any, *, least: int) -> None:
    """Raise a ValueError if ``value`` is not an integer of at least ``least``; a bool is no integer here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{field}={value!r}` is not valid; expected an integer of at least {least}.")
