"""Import the class that a path names: ``package.module.Class`` or ``path/to/file.py:Class``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def check_class_path(field: str, path: str) -> None:
    """Check the spelling of a class path, without importing anything.

    Raises:
        ValueError: ``path`` is not a class path, or names a file that does not exist.
    """
    file, colon, attribute = path.rpartition(":")
    if colon and file.endswith(".py"):
        if not Path(file).is_file():
            raise ValueError(
                f"`{field}={path!r}` is not valid: there is no file {file!r}; expected path/to/file.py:Class."
            )
        parts = [attribute]
    else:
        parts = path.split(".")
    if not all(part.isidentifier() for part in parts) or (len(parts) < 2 and not colon):
        raise ValueError(f"`{field}={path!r}` is not valid; expected package.module.Class or path/to/file.py:Class.")


def load_class(path: str) -> Any:
    """Import the module or file and return the class.

    Raises:
        ImportError: there is no such module, file or class.
    """
    file, colon, name = path.rpartition(":")
    if colon:
        module = _load_file(Path(file))
    else:
        module_name, _, name = path.rpartition(".")
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isclass(value)))
        raise ImportError(f"{path!r}: {module.__name__} has no {name!r}; its classes are: {known or 'none'}.")
    return getattr(module, name)


def build(path: str, arguments: Mapping[str, Any], kind: type, *, seed: int | None = None) -> Any:
    """Make an instance of the class.

    Args:
        path: the class path.
        arguments: keyword arguments of the class.
        kind: the instance must be an instance of this class.
        seed: passed as ``seed`` if the class takes a seed and ``arguments`` has none.
    """
    factory = load_class(path)
    if seed is not None and "seed" not in arguments and "seed" in inspect.signature(factory).parameters:
        arguments = {**arguments, "seed": seed}
    value = factory(**arguments)
    if not isinstance(value, kind):
        raise TypeError(f"{path!r} makes a {type(value).__name__}; expected a {kind.__name__}.")
    return value


def _load_file(file: Path) -> ModuleType:
    """Import a file like ``python file.py`` does: its stem is the module's name, its folder is on the path."""
    path = file.resolve()
    sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # model and data may lie in one file
    spec = importlib.util.spec_from_file_location(file.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} cannot be imported; expected a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
