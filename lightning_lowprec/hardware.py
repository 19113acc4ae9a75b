"""Find out whether a device can run bf16 and FP8, and the reason if it cannot.

A *refusal* is a clause that names the reason; ``None`` means that the device can.
"""

from __future__ import annotations

import ctypes

import torch

FP8_MIN_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with FP8 tensor cores (Ada 8.9, Hopper 9.0)."""
BF16_MIN_CAPABILITY = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bf16 tensor cores (Ampere); older GPUs only emulate bf16."""


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


def every_gpu_has_fp8() -> bool:
    """Return whether all GPUs of this machine have FP8. Ask CUDA only if the driver does not answer.

    Asking CUDA creates a CUDA context, and a process with a context cannot fork the workers of ``ddp_notebook``.
    """
    found = _driver_capabilities()
    if found is None:
        found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return bool(found) and min(found) >= FP8_MIN_CAPABILITY


def _driver_capabilities() -> list[tuple[int, int]] | None:
    """Ask NVML for the compute capability of every GPU; return None if NVML does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        found, failed = [], nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for i in range(count.value):
            failed |= nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
            failed |= nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
            found.append((major.value, minor.value))
        return None if failed else found
    finally:
        nvml.nvmlShutdown()


def default_device() -> torch.device:
    """Return the device that Lightning's ``accelerator="auto"`` would choose, of cuda, mps and cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps", 0)
    return torch.device("cpu")
