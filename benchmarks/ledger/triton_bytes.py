"""Bytes of every Triton kernel that inductor writes, by inductor's own estimate.

The ledger hooks three private places of inductor: ``TritonScheduling.define_kernel``, to ask for the estimate,
``PythonWrapperCodegen.next_kernel_suffix``, because names are numbered anew in every graph, and
``CachingAutotuner.run``, because the estimate for a kernel of any size holds for the size that was compiled first. A
launch of such a kernel counts the bytes of its arguments instead. A kernel that inductor takes from a cache is not
written, so `start` switches that cache off; Triton keeps its compiled kernels.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import Tensor

from benchmarks.ledger.recorder import position

KERNELS: dict[str, int] = {}
"""Bytes read and written by a launch of the kernel of this name."""
OF_ANY_SIZE: set[str] = set()
"""Kernels of which a length is known at the launch only."""
LAUNCHES: dict[int, int] = {}
"""Bytes read and written by a launch of such a kernel, by the index of its record."""
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
    OF_ANY_SIZE.clear()
    LAUNCHES.clear()
    _numbers = itertools.count()


@functools.cache
def _hook() -> None:
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = getattr(TritonScheduling, "define_kernel", None)
    if original is None or not hasattr(PythonWrapperCodegen, "next_kernel_suffix"):
        raise RuntimeError("torch's inductor names its kernels in another way now: their bytes cannot be counted")

    @functools.wraps(original)
    def define_kernel(self: Any, source: str, schedule: Any, kernel: Any) -> str:
        name: str = original(self, source, schedule, kernel)
        KERNELS[name] = int(kernel.estimate_kernel_num_bytes())
        if any(getattr(length, "free_symbols", None) for length in kernel.numels.values()):
            OF_ANY_SIZE.add(name)
        return name

    TritonScheduling.define_kernel = define_kernel  # type: ignore[method-assign]
    PythonWrapperCodegen.next_kernel_suffix = lambda self: str(next(_numbers))  # type: ignore[method-assign]

    launch = CachingAutotuner.run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.inductor_meta.get("kernel_name") in OF_ANY_SIZE:
            LAUNCHES[position()] = _bytes_of(self.fn.arg_names, args)
        return launch(self, *args, **kwargs)

    CachingAutotuner.run = run  # type: ignore[method-assign]


def forget_launches() -> None:
    """Forget launches; call before recording, because the indices of records begin at 0 again."""
    LAUNCHES.clear()


def _bytes_of(names: Any, args: Any) -> int:
    """Return the bytes of the tensors among the arguments; ``in_out`` ones are read and written."""
    tensors = [(name, arg) for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
    return sum(arg.numel() * arg.element_size() * (1 + name.startswith("in_out")) for name, arg in tensors)
