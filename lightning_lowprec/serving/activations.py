"""Round activations to e4m3 as servers do, with scales from the values at hand.

scale  = max(|group|) / 448, float32      # a group: one token, or 128 values of one token
values = round(value / scale) * scale
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.weight_rounding import BLOCK
from lightning_lowprec.serving.formats.base import Format

_SMALLEST: Final = torch.finfo(torch.float32).tiny


def rounded(values: Tensor, format: Format) -> Tensor:
    """Return what a server multiplies by in place of activations: [*, K] any float -> the same shape and dtype.

    Args:
        values: the input of a linear layer.
        format: with codes. Where weights have a scale per row, activations have one per token; where weights have one
            per 128 x 128, activations have one per token and 128 values.
    """
    width, groups = values.shape[-1], values
    if format.scale_per == "block":
        blocks = -(-width // BLOCK)
        groups = F.pad(values, (0, -width % BLOCK)).reshape(*values.shape[:-1], blocks, BLOCK)
    exact = groups.float()
    largest = (exact if format.activation_scales_in_float32 else groups).abs().amax(dim=-1, keepdim=True)
    scale = (largest / E4M3.max).float().clamp(min=_SMALLEST)
    codes = (exact / scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    found = codes.float() * scale
    if format.scale_per == "block":
        found = found.flatten(-2)[..., :width]
    return found.to(values.dtype)
