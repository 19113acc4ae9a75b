"""What a launch of a Triton kernel needs: a compiler on this machine, a current device, numbers on the device."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import final

import torch
from torch import Tensor


@final
class _Simulated:
    """Whether tensors have no values, so that kernels are chosen and not launched."""

    now = False


@contextmanager
def simulated() -> Iterator[None]:
    """Choose kernels as on a GPU, and launch none: to count the memory of a step."""
    _Simulated.now = True
    try:
        yield
    finally:
        _Simulated.now = False


def is_simulated() -> bool:
    """Return whether kernels are not launched."""
    return _Simulated.now


def kernel_missing() -> str | None:
    """Return why a Triton kernel cannot be compiled here, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CC"), "clang", "gcc")
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        return "there is no C compiler, which Triton needs"
    return None


def kernels_run() -> bool:
    """Return whether Triton kernels run; warn once if they do not."""
    return is_simulated() or _kernels_run()


@functools.cache
def _kernels_run() -> bool:
    reason = kernel_missing()
    if reason is not None:
        warnings.warn(
            f"{reason}: optimizer steps with masters, and FP8 codes, are computed by torch's own operations,"
            " with the same results, and move two to six times as many bytes. Install `triton` and a C compiler (for"
            " example gcc).",
            stacklevel=3,
        )
    return reason is None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a kernel is launched for tensors on ``device``; a CPU is Triton's interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else device


def tensor_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return ``numbers`` as a tensor on ``device``: (len(numbers),) of ``dtype``.

    ``torch.tensor(numbers, device="cuda")`` copies from pageable memory, and the host waits until all work of the
    stream has ended. This copy is from pinned memory.
    """
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda" and not is_simulated())
    return on_host.to(device, non_blocking=True)
