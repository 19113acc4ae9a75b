"""FSDP2 for Trainer and Fabric, in every precision."""

from lightning_lowprec.strategies.fabric import FabricFSDP2Strategy
from lightning_lowprec.strategies.parallelize import parallelize
from lightning_lowprec.strategies.trainer import FSDP2Strategy

__all__ = ["FSDP2Strategy", "FabricFSDP2Strategy", "parallelize"]
