"""Run tests that import ``lightning`` over ``pytorch_lightning`` and ``lightning_fabric`` instead.

    python -m pytest -p tests.over_pytorch_lightning --tier 1 tests/contract

The names of the first become names of the second, after this package has met the second alone.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

import lightning_fabric
import pytorch_lightning.cli

import lightning_lowprec
from lightning_lowprec.private.either import MAIN

REAL = {
    "lightning.fabric": "lightning_fabric",
    "lightning.pytorch": "pytorch_lightning",
    "lightning": "pytorch_lightning",
}


def real(name: str) -> str | None:
    """Return the module that a name stands for."""
    return next((to + name[len(start) :] for start, to in REAL.items() if f"{name}.".startswith(f"{start}.")), None)


class Alias(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        return None if real(name) is None else spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(real(spec.name))
        self.own = module.__spec__, module.__loader__  # importlib overwrites them
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self.own


if MAIN.name != "pytorch-lightning" or any(f"{name}.".startswith("lightning.") for name in sys.modules):
    raise ImportError(f"{lightning_lowprec.__name__} has met `lightning` already")
sys.meta_path.insert(0, Alias())
pytorch_lightning.Fabric = lightning_fabric.Fabric  # as `lightning` has it
