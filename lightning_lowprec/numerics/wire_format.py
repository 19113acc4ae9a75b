"""How the weights of a layer travel: float8 codes and one scale each, and what the layer gets of them.

A layer whose weight may be gathered so has a ``wire_format``; :mod:`lightning_lowprec.fsdp2.fp8_gather` does it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class WireFormat(Protocol):
    """The arithmetic of a backend, so that gathered weights are those that its layers would make themselves."""

    dtype: torch.dtype
    """Of the codes: a float8."""
    least_amax: float
    """What a smaller largest absolute value is taken for."""

    def scales(self, amax: Tensor) -> Tensor:
        """What weights are multiplied with: largest absolute values, (...) any float -> (...) float32."""

    def encode(self, values: Tensor, scale: Tensor) -> Tensor:
        """The codes of (a part of) a weight: (...) any float, scalar float32 -> (...) ``dtype``."""

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """What the layer's forward expects as its weight, sharing the memory of ``codes``; it looks like ``dtype``."""

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Make an earlier ``whole`` show other codes."""


def wired_layers(model: nn.Module) -> list[Any]:
    """The layers of ``model`` that have a ``wire_format``."""
    return [module for module in model.modules() if getattr(module, "wire_format", None) is not None]
