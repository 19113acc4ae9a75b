"""The default model and text of ``lowprec compare``: a small real GPT, and text that every machine has."""

from lightning_lowprec.tools.demo.data import StdlibText
from lightning_lowprec.tools.demo.model import ByteGPT

__all__ = ["ByteGPT", "StdlibText"]
