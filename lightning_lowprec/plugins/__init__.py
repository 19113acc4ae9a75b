"""The precision plugins, for Trainer and Fabric alike."""

from lightning_lowprec.plugins.base import LowPrecision
from lightning_lowprec.plugins.fp8_te import FP8TE
from lightning_lowprec.plugins.fp8_torchao import FP8TorchAO
from lightning_lowprec.plugins.half import HalfMixed
from lightning_lowprec.plugins.msamp import MSAMP

__all__ = ["FP8TE", "MSAMP", "FP8TorchAO", "HalfMixed", "LowPrecision"]
