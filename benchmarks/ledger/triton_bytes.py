"""Bytes of every Triton kernel that inductor writes, by inductor's own estimate.

The ledger hooks two private places of inductor: ``TritonScheduling.define_kernel``, to ask for the estimate, and
``PythonWrapperCodegen.next_kernel_suffix``, because names are numbered anew in every graph. A kernel that inductor
takes from a cache is not written, so `start` switches that cache off; Triton keeps its compiled kernels.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

KERNELS: dict[str, int] = {}
"""Bytes read and written by a launch of the kernel of this name."""
_numbers = itertools.count()


def start() -> None:
    """Forget all kernels, and note the bytes of those that are compiled from now on.

    The numbers in the names begin at 0 again, so that equal programs have equal names. Raises RuntimeError if inductor
    has changed.
    """
    global _numbers
    import torch._inductor.config as config

    config.fx_graph_cache = False
    _hook()
    KERNELS.clear()
    _numbers = itertools.count()


@functools.cache
def _hook() -> None:
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    original = getattr(TritonScheduling, "define_kernel", None)
    if original is None or not hasattr(PythonWrapperCodegen, "next_kernel_suffix"):
        raise RuntimeError("torch's inductor names its kernels in another way now: their bytes cannot be counted")

    @functools.wraps(original)
    def define_kernel(self: Any, source: str, schedule: Any, kernel: Any) -> str:
        name: str = original(self, source, schedule, kernel)
        KERNELS[name] = int(kernel.estimate_kernel_num_bytes())
        return name

    TritonScheduling.define_kernel = define_kernel  # type: ignore[method-assign]
    PythonWrapperCodegen.next_kernel_suffix = lambda self: str(next(_numbers))  # type: ignore[method-assign]
