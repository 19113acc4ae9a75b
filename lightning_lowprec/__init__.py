"""Low-precision training for PyTorch Lightning and Fabric by changing one word.

Importing this package makes ``precision="fp8-hybrid"`` and its kin known to stock Lightning:

    import lightning as L
    import lightning_lowprec

    trainer = L.Trainer(precision="fp8-hybrid")
"""

from lightning_lowprec import recipes
from lightning_lowprec.plugins import FP8TE, MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.registration import register, unregister
from lightning_lowprec.strategies import FabricFSDP2Strategy, FSDP2Strategy, parallelize

__version__ = "0.1.0"
__all__ = [
    "FP8TE",
    "MSAMP",
    "FP8TorchAO",
    "FSDP2Strategy",
    "FabricFSDP2Strategy",
    "HalfMixed",
    "parallelize",
    "recipes",
    "register",
    "unregister",
]

register()
