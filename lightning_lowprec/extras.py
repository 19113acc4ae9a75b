"""Import optional and heavy dependencies on demand, and say how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

INSTALL = {
    "torchao": "pip install 'torchao>=0.13'",
    "transformer_engine": "pip install --no-build-isolation 'transformer-engine[core-cu13,pytorch]>=2.20,<2.21'",
    "matplotlib": "pip install 'lightning-lowprec[report]'",
    "transformers": "pip install 'lightning-lowprec[hf]'",
    "safetensors": "pip install 'lightning-lowprec[hf]'",
}


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: the module to import, such as ``"torchao.float8"``.
        purpose: the part of this package that needs the module, for the error: ``"FP8TorchAO"``.

    Raises:
        ModuleNotFoundError: the package is not installed; the message has the command that installs it.
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


def import_refusal(module: str, purpose: str) -> str | None:
    """Import ``module``; return the reason if the import fails, else None."""
    try:
        require(module, purpose)
    except ImportError as error:
        return str(error)
    return None
