"""Refuse attributes of another stack's plugin: set on ours, they would do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, final


@final
class ForeignAttribute:
    """An attribute that plugins do not have: reading it fails as usual, and setting it raises with the way out.

    A data descriptor on the class: it costs nothing where other attributes are set.
    """

    def __init__(self, name: str, answer: str) -> None:
        self._name = name
        self._answer = answer

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"plugins of lightning_lowprec have no attribute {self._name!r}. {self._answer}")

    def __set__(self, instance: object, value: Any) -> NoReturn:
        raise AttributeError(
            f"`{self._name}={value!r}` cannot be set on a {type(instance).__name__}: the attribute is that of NeMo's"
            f" plugin, and would do nothing here. {self._answer}"
        )


def refuse_foreign(cls: type, answers: Mapping[str, str]) -> None:
    """Put a :class:`ForeignAttribute` for every name of ``answers`` that ``cls`` does not have itself."""
    for name, answer in answers.items():
        if not hasattr(cls, name):
            setattr(cls, name, ForeignAttribute(name, answer))
