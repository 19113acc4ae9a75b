"""Find out whether the installed libraries still have the names that this package uses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from types import CodeType
from typing import Any


def missing(names: Iterable[str]) -> list[str]:
    """Return the names that do not exist.

    Args:
        names: ``"library.module.Class.method"``; or ``"library.module.Class().attribute"`` for an attribute that only
            instances have, whose name must stand in the code of the class. A function may be there in place of a class.
    """
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    dotted, _, attribute = name.partition("().")
    path, *parts = dotted.split(".")
    found: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if inspect.ismodule(found) and not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return not attribute or attribute in _mentions(found)


def _mentions(found: Any) -> set[str]:
    """Return the names and the strings in the code of a function, or of all methods of a class and its bases."""
    members = [value for cls in found.__mro__ for value in vars(cls).values()] if inspect.isclass(found) else [found]
    functions = [inspect.unwrap(getattr(m, "fget", None) or getattr(m, "__func__", m)) for m in members]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    mentioned: set[str] = set()
    while codes:
        code = codes.pop()
        mentioned.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return mentioned
