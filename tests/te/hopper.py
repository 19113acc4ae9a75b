"""A machine that answers as a Hopper GPU would, until a kernel is asked for."""

import sys

import torch
from transformer_engine.pytorch import quantization

from lightning_lowprec.te import plugin

ASKING = ("transformer_engine.", plugin.__name__)


def pretend(monkeypatch) -> None:
    """Transformer Engine is told of CUDA and of every recipe that Hopper has; torch and Lightning are not."""
    real = torch.cuda.is_available
    asked = lambda: sys._getframe(1).f_globals["__name__"].startswith(ASKING) or real()  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    for name in ("_FP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT", "_NVFP4_SUPPORT"):
        monkeypatch.setattr(quantization, name, (True, ""))
    monkeypatch.setattr(plugin.FP8TE, "refusal", lambda plugin, device: None)


def take_any_input(monkeypatch) -> None:
    """Layers take inputs on CPU."""
    from lightning_lowprec.te import layer, norms

    for module in (layer, norms):
        monkeypatch.setattr(module, "check_input", lambda input: None)
