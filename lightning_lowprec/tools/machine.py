"""Read the driver, the versions and the backends of this machine, as plain values."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import Backend
from lightning_lowprec.extras import INSTALL, import_refusal
from lightning_lowprec.hardware import describe
from lightning_lowprec.private import lightning as lightning_names
from lightning_lowprec.private import torch as torch_names
from lightning_lowprec.private import torchao as torchao_names
from lightning_lowprec.private import transformer_engine as transformer_engine_names
from lightning_lowprec.private import transformers as transformers_names

LIBRARIES = (torch_names, lightning_names, torchao_names, transformer_engine_names, transformers_names)
"""For each library, the file that knows which of the library's private names this package uses."""


def machine(device: torch.device) -> dict[str, Any]:
    """Return device, driver, versions, backends, and the private names that the libraries no longer have."""
    return {
        "device": describe(device),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions(
            ["lightning-lowprec", "torch", "lightning", *distributions(), "jsonargparse", "matplotlib"]
        ),
        "backends": {backend.title: _status(backend) for backend in backends.registered()},
        "moved": [name for library in LIBRARIES for name in library.moved()],
    }


def distributions() -> list[str]:
    """Return the distributions that the backends need."""
    return [backend.distribution for backend in backends.registered() if backend.distribution is not None]


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, or None for a package that is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def _status(backend: Backend) -> str:
    """Say in one line whether a backend's library is installed and imports; if not, the reason and what to install."""
    if backend.module is None:
        return "needs nothing beside torch"
    library = backend.module.partition(".")[0]
    if find_spec(library) is None:
        return f"not installed: `{INSTALL.get(library, f'pip install {backend.distribution}')}`"
    refusal = import_refusal(backend.module, backend.title)
    return "imports" if refusal is None else refusal.splitlines()[0]
