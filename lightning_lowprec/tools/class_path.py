"""From a class path to the class."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def build(path: str, arguments: Mapping[str, Any], kind: type, *, seed: int | None = None) -> Any:
    """An instance of the class that `path` names.

    Args:
        path: `package.module.Class` or `path/to/file.py:Class`.
        arguments: Keyword arguments.
        kind: What the instance must be.
        seed: Passed as `seed` if the class takes one and `arguments` has none.
    """
    factory = load_class(path)
    if seed is not None and "seed" not in arguments and "seed" in inspect.signature(factory).parameters:
        arguments = {**arguments, "seed": seed}
    value = factory(**arguments)
    if not isinstance(value, kind):
        raise TypeError(f"{path!r} makes a {type(value).__name__}; expected a {kind.__name__}.")
    return value


def load_class(path: str) -> Any:
    """What `path` names, imported."""
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


def _load_file(file: Path) -> ModuleType:
    """Import a file under the name of its stem, its folder on the path, as `python file.py` would have it."""
    sys.path.insert(0, str(file.resolve().parent))
    if file.stem in sys.modules:  # the class path and the data path may name the same file
        loaded = sys.modules[file.stem]
        if getattr(loaded, "__file__", None) == str(file.resolve()):
            return loaded
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} cannot be imported; expected a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
