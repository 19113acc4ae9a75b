"""Padding for kernels that want sizes in multiples of a number."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros until the number of rows is a multiple of ``multiple``: [M, K] -> [M', K]."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % multiple))
