"""A small real model and a real text that every machine has: what `lowprec compare` trains by default."""

from lightning_lowprec.tools.demo.data import StdlibText
from lightning_lowprec.tools.demo.model import ByteGPT

__all__ = ["ByteGPT", "StdlibText"]
