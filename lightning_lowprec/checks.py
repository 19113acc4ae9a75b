"""Checks of arguments, with one wording: the field, the value that was given, the values that are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_choice(field: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise if ``value`` is not one of ``allowed``.

    Args:
        field: the name of the argument.
        value: the value that the user gave.
        allowed: the values to compare with, for example ``get_args`` of a ``Literal``. Strings stand in the message
            without quotes.

    Raises:
        ValueError: ``value`` is not allowed.
    """
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {', '.join(map(str, choices))}.")


def check_integer(field: str, value: Any, *, least: int) -> None:
    """Raise if ``value`` is not an integer of at least ``least``.

    Raises:
        ValueError: ``value`` is of another type, a bool, or too small.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{field}={value!r}` is not valid; expected an integer of at least {least}.")
