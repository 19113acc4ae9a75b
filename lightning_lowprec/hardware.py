"""Find out whether a device can run bf16 and FP8, and the reason if it cannot.

A *refusal* is a clause that names the reason; ``None`` means that the device can.
"""

from __future__ import annotations

import torch

FP8_MIN_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with FP8 tensor cores (Ada 8.9, Hopper 9.0)."""
BF16_MIN_CAPABILITY = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bf16 tensor cores (Ampere); older GPUs only emulate bf16."""

_GROUPED = ((9, 0), (10, 0))
"""Capabilities for which ``torch._scaled_grouped_mm`` has kernels with a scale per row."""


def describe(device: torch.device) -> str:
    """Return the device in words, e.g. ``"NVIDIA H200 (compute capability 9.0)"`` or ``"cpu"``."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def bf16_refusal(device: torch.device) -> str | None:
    """Return why ``device`` has no bf16 hardware, or None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(device) >= BF16_MIN_CAPABILITY:
        return None
    return f"{describe(device)} has no bf16 tensor cores (they start at compute capability 8.0)"


def fp8_refusal(device: torch.device) -> str | None:
    """Return why ``device`` has no FP8 matrix kernels, or None if it has."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 matrix kernels"
    if torch.cuda.get_device_capability(device) >= FP8_MIN_CAPABILITY:
        return None
    return f"{describe(device)} has no FP8 tensor cores (they start at compute capability 8.9)"


def grouped_fp8_refusal(device: torch.device) -> str | None:
    """Return why ``device`` has no kernels for grouped products in FP8, or None if it has: Hopper, and 10.0."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) in _GROUPED:
        return None
    return f"{describe(device)} has no FP8 kernel for grouped products (torch has one for capability 9.0 and 10.0)"


def default_device() -> torch.device:
    """Return the device that Lightning's ``accelerator="auto"`` would choose, of cuda, mps and cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps", 0)
    return torch.device("cpu")
