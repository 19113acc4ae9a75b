"""The error of an approximation."""

import torch
from torch import Tensor


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Return signal to quantisation noise in dB: ``10 log10(sum reference**2 / sum (reference - approximation)**2)``.

    Equal tensors give inf. Sums are in float64.
    """
    signal = reference.detach().double()
    noise = (signal - approximation.detach().double()).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise else float("inf")
