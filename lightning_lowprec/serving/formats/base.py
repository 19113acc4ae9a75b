"""What a format of a served model is: the names and shapes of codes and scales, and what the config says about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from lightning_lowprec.numerics.weight_rounding import BLOCK, ScalePer


@final
@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the config of a folder says about its codes."""

    kept: Sequence[str]
    """The names of the linear layers in high precision, as modules of the model and as the folder names them."""
    weights_only: bool
    """Whether the server multiplies in high precision, and reads weights only in FP8."""


@final
@dataclass(frozen=True, kw_only=True)
class Header:
    """What the headers of the safetensors files of a folder may have to say."""

    coded: Mapping[str, tuple[int, ...]]
    """The shapes of the weights that are stored as codes, by name."""
    plain: Iterable[str]
    """The names of all other tensors."""
    dtype: torch.dtype
    """The dtype of the values that codes stand for."""
    weights_only: bool
    """See :class:`Choices`."""


@final
@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of a folder, for ``format=``."""

    name: str
    """The name, as users write it."""
    scale_per: ScalePer | None
    """What has a scale of its own; None: the format has no codes."""
    names: Callable[[str], tuple[str, str]]
    """Returns the names of codes and reciprocal scales: ``"a.weight" -> ("a.weight", "a.weight_scale")``."""
    config: Callable[[Choices], dict[str, Any] | None]
    """Returns ``quantization_config`` of the config."""
    takes_experts: bool = True
    """Whether servers read codes of experts that the model stacks, one Linear per expert."""
    activation_scales_in_float32: bool = True
    """Whether servers compute the scales of activations in float32; else in the dtype of the activations."""
    refusal: Callable[[tuple[int, ...]], str | None] = lambda shape: None
    """Returns why a weight of this shape, [N, K], stays in high precision."""
    metadata: Callable[[Header], dict[str, str]] = lambda header: {}
    """Returns what the header of every safetensors file says beside ``format``."""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight, [N, K]."""
        rows, columns = shape
        return (rows, 1) if self.scale_per == "row" else (-(-rows // BLOCK), -(-columns // BLOCK))
