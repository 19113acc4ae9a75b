"""Import optional and heavy dependencies on demand, and say how to install them; find out which names they have."""

import dis
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from types import CodeType, ModuleType
from typing import Any

INSTALL = {
    "deepspeed": "pip install 'deepspeed>=0.19.8,<0.20'",
    "torchao": "pip install 'torchao>=0.13,<0.19'",
    "transformer_engine": "pip install --no-build-isolation 'transformer-engine[core-cu13,pytorch]>=2.20,<2.21'",
    "transformers": "pip install 'transformers>=4.55' 'safetensors>=0.4'",
}


def require(module: str, purpose: str) -> ModuleType:
    """Import a module of an optional dependency that ``purpose``, a part of this package, needs.

    ModuleNotFoundError: the package is not installed; the message has the command that installs it. Any other
    ImportError: the package is installed, but is broken or does not fit the installed torch.
    """
    root = module.partition(".")[0]
    remedy = INSTALL.get(root, f"pip install {root}")
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AttributeError, AssertionError, RuntimeError) as error:  # Transformer Engine asserts
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            message = f"{purpose} needs {root}, which is not installed: `{remedy}`."
            raise ModuleNotFoundError(message, name=root) from error
        raise ImportError(
            f"{purpose} needs {root}, which is installed but does not import ({type(error).__name__}: {error})."
            f" Install a version that goes with this torch: `{remedy}`.",
            name=root,
        ) from error


def installed(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, or None for a package that is not installed."""
    found = {name: next(iter(distributions(name=name)), None) for name in packages}
    return {name: None if package is None else package.version for name, package in found.items()}


def import_refusal(module: str, purpose: str) -> str | None:
    """Import ``module``; return the reason if the import fails, else None."""
    try:
        require(module, purpose)
    except ImportError as error:
        return str(error)
    return None


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
