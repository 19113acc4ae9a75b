"""Multiply a tensor in place by a factor that only the device knows, and that is often one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowprec.numerics.launches import is_simulated, kernels_run, on_device
from lightning_lowprec.private.torch import increment_versions

DEVICES = {"cuda"}


def multiply_(values: Tensor, factor: Tensor) -> Tensor:
    """``values *= factor``, computed in float32 and rounded once; returns ``values``.

    On a GPU nothing is read or written if the factor, () float32, is 1: the gradient of a loss mostly begins with 1.
    ``mul_`` of torch reads and writes every value: 4.2 GB for the float32 gradient of a head of 128,256 x 4,096.
    """
    fits = values.device.type in DEVICES and not torch.compiler.is_compiling() and values.is_contiguous()
    if not fits or not values.numel() or not kernels_run():
        return values.mul_(factor)
    launch([values], factor)
    increment_versions([values])
    return values


def launch(tensors: list[Tensor], factor: Tensor) -> None:
    """Launch the kernel for each of ``tensors``, which are contiguous and on the device of ``factor``."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import kernels

    with on_device(factor.device):
        for tensor in tensors:
            programs = -(-tensor.numel() // kernels.FACTOR_BLOCK.value)
            bf16 = tensor.dtype == torch.bfloat16
            bits = tensor.view(torch.int16) if bf16 else tensor
            kernels.multiply[(programs,)](bits, factor, tensor.numel(), BF16=bf16)
