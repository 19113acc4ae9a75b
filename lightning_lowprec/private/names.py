"""Find out whether the installed libraries still have the names that this package uses, and read or replace names."""

import dis
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any


def missing(names: Iterable[str]) -> list[str]:
    """Return the names that do not exist, of names such as ``"library.module.Class.method"``.

    ``"library.module.Class().attribute"`` is an attribute that only instances have: the code of the class must assign
    it. A function may be there in place of a class. A library that does not import raises ImportError.
    """
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    dotted, _, attribute = name.partition("().")  # by hand: pkgutil.resolve_name looks for files at each call
    path, *parts = dotted.split(".")
    value: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if inspect.ismodule(value) and not hasattr(value, part):
            try:
                value = importlib.import_module(path)  # torch.optim deletes the names of its modules
            except ImportError:
                return False
            continue
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return not attribute or attribute in _assigned(value)


@functools.cache  # it disassembles classes of torch
def _assigned(owner: Any) -> set[str]:
    """Return the attributes that a function or the methods of a class and its bases assign, and all their strings."""
    members = [value for cls in owner.__mro__ for value in vars(cls).values()] if inspect.isclass(owner) else [owner]
    functions = [inspect.unwrap(getattr(m, "fget", None) or getattr(m, "__func__", m)) for m in members]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    assigned: set[str] = set()
    while codes:
        code = codes.pop()
        assigned.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
        assigned.update(constant for constant in code.co_consts if isinstance(constant, str))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return assigned


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give a module or class an attribute within the context; the owner may have, inherit, or not have it."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
