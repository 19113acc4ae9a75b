"""Low-precision training for PyTorch Lightning and Fabric by changing one word.

Stock Lightning accepts ``precision="fp8-hybrid"`` and the other names where this package is installed, or imported:

    import lightning as L

    trainer = L.Trainer(precision="fp8-hybrid")

Only the command ``lowprec`` starts without torch and Lightning, so that it answers ``--help`` and a wrong option at
once; it imports all of this package by ``tools.class_path.load_package`` before it imports anything of the user's.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightning_lowprec.gone import missing_attribute
from lightning_lowprec.version import __version__

if TYPE_CHECKING:
    from lightning_lowprec.tools.compare.runner import compare
    from lightning_lowprec.tools.doctor import doctor
    from lightning_lowprec.tools.planning.command import plan


def _command_starts() -> bool:
    """Return whether this is the process of the command ``lowprec``, whose module is not imported yet."""
    started = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
    return started == "lowprec" and "lightning_lowprec.tools.cli" not in sys.modules


if not _command_starts():
    from lightning_lowprec import recipes
    from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy
    from lightning_lowprec.fsdp2.strategy import parallelize
    from lightning_lowprec.fsdp2.trainer import FSDP2Strategy
    from lightning_lowprec.masters.config import MasterConfig
    from lightning_lowprec.messages import LowPrecisionWarning
    from lightning_lowprec.msamp.plugin import MSAMP
    from lightning_lowprec.numerics.fp8_average import fp8_gradient_hook
    from lightning_lowprec.precision.half import HalfEval, HalfMixed
    from lightning_lowprec.precision.loss_scale import LossScale
    from lightning_lowprec.precision.plain import plain
    from lightning_lowprec.registration import register, unregister
    from lightning_lowprec.serving.export import export, fp8_state
    from lightning_lowprec.te.plugin import FP8TE
    from lightning_lowprec.torchao.fp8 import FP8TorchAO
    from lightning_lowprec.torchao.int8 import Int8TorchAO

    register()

_TOOLS: Final = {"compare": "compare.runner", "doctor": "doctor", "plan": "planning.command"}
"""The module of each tool below ``tools``; a module is imported when its tool is asked for."""

__all__ = [
    "FP8TE",
    "MSAMP",
    "FP8TorchAO",
    "FSDP2Strategy",
    "FabricFSDP2Strategy",
    "HalfEval",
    "HalfMixed",
    "Int8TorchAO",
    "LossScale",
    "LowPrecisionWarning",
    "MasterConfig",
    "__version__",
    "compare",
    "doctor",
    "export",
    "fp8_gradient_hook",
    "fp8_state",
    "parallelize",
    "plain",
    "plan",
    "recipes",
    "register",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name == "callbacks":  # `lightning_lowprec.callbacks.NumericsMonitor`, without an import of its own
        return import_module(f"{__name__}.callbacks")
    if name not in _TOOLS:
        raise missing_attribute(__name__, name)
    return getattr(import_module(f"{__name__}.tools.{_TOOLS[name]}"), name)
