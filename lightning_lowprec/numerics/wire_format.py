"""The arithmetic of an all-gather of codes: ranks exchange codes, and know the scale of a weight, or of its tiles.

A layer whose weight can be gathered as codes has a ``wire_format``.
"""

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lightning_lowprec.numerics.tiles import Tile


class WireFormat(Protocol):
    """The arithmetic of a backend; gathered weights equal the weights that its layers would quantise themselves."""

    dtype: torch.dtype
    """A float8."""
    least_amax: float
    """The lower bound of the largest absolute value: a smaller one is replaced."""
    tile: Tile | None
    """Rows and columns of what has a scale of its own; None: the weight has one scale."""
    per_step: bool
    """Whether a shard is encoded once per optimizer step, and its codes are kept, instead of at every all-gather."""

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of weights from their largest absolute values: (...) any float -> (...) float32.

        With tiles: of all tiles of one weight, [rows, columns].
        """

    def encode(self, values: Tensor, scale: Tensor, *, first: int = 0, out: Tensor | None = None) -> Tensor:
        """Encode a weight, or a part, maybe into ``out``: (...) any float, scalar float32 -> (...) ``dtype``.

        With tiles: the scales of all tiles, and the ``first`` row of the part.
        """

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight for the layer's forward, sharing the memory of ``codes``; it appears to have ``dtype``."""

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Give a tensor that ``whole`` returned earlier other codes."""


@final
@dataclass(frozen=True)
class WiredWeight:
    """A weight that can be gathered in float8."""

    layer: Any
    name: str

    @property
    def weight(self) -> Any:
        """The weight; no parameter if a hook computes it."""
        return getattr(self.layer, self.name)


def wired_weights(model: nn.Module) -> list[WiredWeight]:
    """Return the weights of layers with a ``wire_format``: ``weight``, or the names in the layer's ``wired``."""
    layers = [module for module in model.modules() if getattr(module, "wire_format", None) is not None]
    return [WiredWeight(layer, name) for layer in layers for name in getattr(layer, "wired", ("weight",))]
