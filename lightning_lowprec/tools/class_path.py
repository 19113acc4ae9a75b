"""Import the class that a path names: ``package.module.Class`` or ``path/to/file.py:Class``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_class(path: str) -> Any:
    """Import the module or file and return the class. The folder of a file is put on ``sys.path``, as Python does.

    Raises:
        ValueError: ``path`` is not a class path.
        ImportError: there is no such module, file or class.
    """
    file, colon, name = path.rpartition(":")
    if colon:
        sys.path.insert(0, str(Path(file).resolve().parent))
        module_name = Path(file).stem
    else:
        module_name, _, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        raise ValueError(f"{path!r} is not a class path; expected package.module.Class or path/to/file.py:Class.")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isclass(value)))
        raise ImportError(f"{path!r}: {module.__name__} has no {name!r}; its classes are: {known or 'none'}.")
    return getattr(module, name)


def build(path: str, arguments: Mapping[str, Any], *, seed: int) -> Any:
    """Make an instance of the class; a class that takes a ``seed`` gets ``seed`` if ``arguments`` has none."""
    factory = load_class(path)
    if "seed" in inspect.signature(factory).parameters:
        arguments = {"seed": seed, **arguments}
    return factory(**arguments)
