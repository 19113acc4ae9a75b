"""The number formats of torch that tensors are cast to, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

HALF_DTYPES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One floating-point format of torch."""

    dtype: torch.dtype
    """The dtype of torch."""
    max: float
    """The largest finite value."""
    has_inf: bool
    """Whether infinity has a code; otherwise infinity becomes NaN."""


E4M3: Final = Format(dtype=torch.float8_e4m3fn, max=448.0, has_inf=False)
"""Weights, activations, first moments (OCP FP8, arXiv 2209.05433, table 1)."""

E5M2: Final = Format(dtype=torch.float8_e5m2, max=57344.0, has_inf=True)
"""Gradients of activations, which need more range than precision (the same table)."""

FP16: Final = Format(dtype=torch.float16, max=65504.0, has_inf=True)
"""IEEE 754 binary16: masters and second moments, with a scale."""
