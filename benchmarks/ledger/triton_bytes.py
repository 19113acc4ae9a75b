"""Bytes of every Triton kernel that inductor writes, by inductor's own estimate.

The one private place of torch that the ledger hooks: ``TritonScheduling.define_kernel``. A kernel that inductor takes
from a cache is not written, so `watch` switches inductor's caches off; Triton keeps its compiled kernels.
"""

from __future__ import annotations

import functools
from typing import Any

KERNELS: dict[str, int] = {}
"""Bytes read and written by a launch of the kernel of this name. The names are unique in a process."""


def watch() -> None:
    """Note the bytes of all kernels that are compiled from now on. Raises RuntimeError if inductor has changed."""
    import torch._inductor.config as config
    from torch._inductor.codegen.triton import TritonScheduling

    config.fx_graph_cache = False
    config.autotune_local_cache = True
    original = getattr(TritonScheduling, "define_kernel", None)
    if original is None:
        raise RuntimeError("torch's inductor has no TritonScheduling.define_kernel any more: bytes cannot be counted")
    if hasattr(original, "counts"):
        return

    @functools.wraps(original)
    def define_kernel(self: Any, source: str, schedule: Any, kernel: Any) -> str:
        name: str = original(self, source, schedule, kernel)
        KERNELS[name] = max(KERNELS.get(name, 0), int(kernel.estimate_kernel_num_bytes()))
        return name

    define_kernel.counts = True  # type: ignore[attr-defined]
    TritonScheduling.define_kernel = define_kernel  # type: ignore[method-assign]
