"""Whether Triton kernels can be compiled on this machine."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import final


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
