"""Low-precision training for PyTorch Lightning and Fabric by changing one word.

Import this package, and stock Lightning accepts ``precision="fp8-hybrid"`` and the other names:

    import lightning as L
    import lightning_lowprec

    trainer = L.Trainer(precision="fp8-hybrid")
"""

from lightning_lowprec import recipes
from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy
from lightning_lowprec.fsdp2.strategy import parallelize
from lightning_lowprec.fsdp2.trainer import FSDP2Strategy
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.msamp.plugin import MSAMP
from lightning_lowprec.numerics.fp8_average import fp8_gradient_hook
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.precision.half_eval import HalfEval
from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.precision.plain import plain
from lightning_lowprec.registration import register, unregister
from lightning_lowprec.serving.evaluation import LowPrecisionEval
from lightning_lowprec.serving.export import export
from lightning_lowprec.serving.state import fp8_state
from lightning_lowprec.te.plugin import FP8TE
from lightning_lowprec.torchao.plugin import FP8TorchAO
from lightning_lowprec.torchao_prototype.int8 import Int8TorchAO
from lightning_lowprec.torchao_prototype.mxfp8 import MXFP8TorchAO

__version__ = "0.2.0"
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
    "LowPrecisionEval",
    "MXFP8TorchAO",
    "MasterConfig",
    "export",
    "fp8_gradient_hook",
    "fp8_state",
    "parallelize",
    "plain",
    "recipes",
    "register",
    "unregister",
]

register()
