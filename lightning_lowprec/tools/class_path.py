"""Import the class that a path names: ``package.module.Class`` or ``path/to/file.py:Class``."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def import_from_working_folder() -> None:
    """Let modules of the working folder be imported, as ``python`` does; a console command has its own folder there."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)


def load_package() -> None:
    """Import all of this package, which the process of ``lowprec`` has not done, for the user's code to find it."""
    package = sys.modules["lightning_lowprec"]
    if not hasattr(package, "register"):
        importlib.reload(package)


def module_path(path: str) -> str:
    """Return ``path/to/file.py:Class`` as ``file.Class``, with the file's folder first on ``sys.path``."""
    file, colon, name = path.rpartition(":")
    if not colon:
        return path
    if not Path(file).is_file():
        raise ValueError(f"{path!r}: {file!r} is not a file; expected path/to/file.py:Class or package.module.Class.")
    folder = str(Path(file).resolve().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    return f"{Path(file).stem}.{name}"


def module_paths(argv: Sequence[str]) -> list[str]:
    """Return the arguments of LightningCLI, which knows ``file.Class`` alone, with every ``file.py:Class`` replaced."""
    file_class = re.compile(r"^(--[\w.]+=)?(\S+\.py:[A-Za-z_]\w*)$")
    return [file_class.sub(lambda match: f"{match[1] or ''}{module_path(match[2])}", argument) for argument in argv]


def load_class(path: str) -> Any:
    """Import the module or file and return the class. The folder of a file is put on ``sys.path``, as Python does."""
    module_name, _, name = module_path(path).rpartition(".")
    if not module_name or not name.isidentifier():
        raise ValueError(f"{path!r} is not a class path; expected package.module.Class or path/to/file.py:Class.")
    load_package()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise ModuleNotFoundError(
            f"{path!r}: No module named {error.name!r}, neither in the working folder ({os.getcwd()}) nor installed."
            " Run the command in the folder of the module, or write path/to/file.py:Class.",
            name=error.name,
        ) from error
    if not hasattr(module, name):
        public = getattr(module, "__all__", vars(module))
        classes = ", ".join(sorted(key for key in public if inspect.isclass(getattr(module, key, None))))
        raise ImportError(f"{path!r}: {module.__name__} has no {name!r}; its classes are: {classes or 'none'}.")
    return getattr(module, name)


def build(path: str, arguments: Mapping[str, object], *, seed: int) -> Any:
    """Make an instance of the class; a class that takes a ``seed`` gets ``seed`` if ``arguments`` has none."""
    factory = load_class(path)
    if "seed" in inspect.signature(factory).parameters:
        arguments = {"seed": seed, **arguments}
    return factory(**arguments)
