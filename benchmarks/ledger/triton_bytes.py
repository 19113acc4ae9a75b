"""Bytes of every Triton kernel that inductor writes, by inductor's own estimate.

The ledger hooks three private places of inductor: ``TritonScheduling.define_kernel``, to write the estimate into the
kernel's own description, ``PythonWrapperCodegen.next_kernel_suffix``, because names are numbered anew in every graph,
and ``CachingAutotuner.run``, which reads the description at every launch: a kernel may come from inductor's cache. The
estimate for a kernel of any size holds for the size that was compiled first; a launch of such a kernel counts the bytes
of its arguments instead.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

from torch import Tensor

from benchmarks.ledger.recorder import position

KERNELS: dict[str, int] = {}
"""Bytes read and written by a launch of the kernel of this name; of kernels that were launched since `start`."""
LAUNCHES: dict[int, int] = {}
"""Bytes read and written by a launch of a kernel of which a length is known then only, by the index of its record."""
_BYTES, _ANY_SIZE = "ledger_bytes", "ledger_any_size"
"""Keys of a kernel's description."""
_NAME = "'kernel_name': "
"""Where inductor's source of a kernel describes it."""
_ends: list[str] = []
"""The end of the name of the kernel that is being written."""
_of = [""]
"""What `start` was told."""
_numbers = itertools.count()


def start(of: str = "") -> None:
    """Forget all kernels, and note the bytes of those that are compiled and launched from now on.

    Programs share compiled kernels through inductor's cache where ``of`` is the same. A kernel of any size is made for
    the size that comes first, so programs that are counted say their sizes. The names of kernels end in a digest of
    their source, so that equal programs have equal names. Raises RuntimeError if inductor has changed.
    """
    _of[0] = of
    _hook()
    KERNELS.clear()
    LAUNCHES.clear()


@functools.cache
def _hook() -> None:
    import torch._inductor.config as config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = getattr(TritonScheduling, "define_kernel", None)
    if original is None or not hasattr(PythonWrapperCodegen, "next_kernel_suffix"):
        raise RuntimeError("torch's inductor names its kernels in another way now: their bytes cannot be counted")

    class Described(CustomGraphPass):
        """Changes nothing, but the key of inductor's cache: kernels that are not described are others."""

        def __call__(self, graph: Any) -> None:
            """Leave the graph as it is."""

        def uuid(self) -> Any:
            """Return a digest of this file, and what `start` was told."""
            return get_hash_for_files((__file__,)), _of[0]

    config.post_grad_custom_pre_pass = Described()

    @functools.wraps(original)
    def define_kernel(self: Any, source: str, schedule: Any, kernel: Any) -> str:
        if _NAME not in source:
            raise RuntimeError("torch's inductor describes its kernels in another way now: they cannot be counted")
        any_size = any(getattr(length, "free_symbols", None) for length in kernel.numels.values())
        description = f"{_BYTES!r}: {int(kernel.estimate_kernel_num_bytes())}, {_ANY_SIZE!r}: {any_size}, "
        source = source.replace(_NAME, description + _NAME)
        _ends.append(hashlib.sha256(source.encode()).hexdigest()[:8])
        try:
            name: str = original(self, source, schedule, kernel)
        finally:
            _ends.pop()
        return name

    TritonScheduling.define_kernel = define_kernel  # type: ignore[method-assign]
    PythonWrapperCodegen.next_kernel_suffix = lambda self: _ends[-1] if _ends else str(next(_numbers))  # type: ignore[method-assign]

    launch = CachingAutotuner.run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        description = self.inductor_meta
        if self.fn.__name__ == "encode_weight":  # our own, of which inductor knows no bytes
            KERNELS["encode_weight"] = LAUNCHES[position()] = of_codes(args[0], self.triton_meta["constants"]["MODE"])
        if _BYTES in description:
            KERNELS[description["kernel_name"]] = description[_BYTES]
            if description[_ANY_SIZE]:
                LAUNCHES[position()] = _bytes_of(self.fn.arg_names, args)
        return launch(self, *args, **kwargs)

    CachingAutotuner.run = run  # type: ignore[method-assign]


def forget_launches() -> None:
    """Forget launches; call before recording, because the indices of records begin at 0 again."""
    LAUNCHES.clear()


def of_codes(weight: Tensor, mode: str, measured: bool = False) -> int:
    """Return what a launch of `encode_weight` reads and writes, or two if it is ``measured``; "mend" finds no work."""
    size, written = weight.element_size(), 0 if mode == "measure" else 2
    return 0 if mode == "mend" else weight.numel() * (size * (1 + measured) + written)


def _bytes_of(names: Any, args: Any) -> int:
    """Return the bytes of the tensors among the arguments; ``in_out`` ones are read and written."""
    tensors = [(name, arg) for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
    return sum(arg.numel() * arg.element_size() * (1 + name.startswith("in_out")) for name, arg in tensors)
