"""Import optional and heavy dependencies on demand, and say how to install them."""

import importlib
from collections.abc import Iterable
from importlib.metadata import distributions
from types import ModuleType

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
