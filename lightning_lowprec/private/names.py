"""Find out whether the installed libraries still have the names that this package uses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from types import CodeType
from typing import Any


def missing(names: Iterable[str]) -> list[str]:
    """Return the dotted names that do not exist.

    Args:
        names: of modules, of attributes, and of attributes that exist on instances only: the last part of such a name
            stands somewhere in the code of the class or of the function that the other parts name.
    """
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    path, *parts = name.split(".")
    found: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif not inspect.ismodule(found):
            return part in _mentions(found)
        else:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


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
