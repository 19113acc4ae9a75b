"""What inductor is told: options of compiled blocks, and a fault of Triton from torch 2.14 on, and what avoids it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")
_FIRST = (2, 14)
"""The first version of torch whose code has the instructions."""


@functools.cache
def block_options() -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` for blocks with converted layers, as far as this torch knows them.

    Values of up to 60 operations, not 30, are computed again where they are read, instead of written and read. GB per
    block of the 8B-shaped stack (`make ledger`): rowwise 13.8 -> 12.3, rowwise-gw-hp 11.2 -> 10.6, int8 11.9 -> 11.3,
    MS-AMP 11.7 -> 10.8; tensorwise, 128-blocks and MXFP8 as they were.
    """
    from torch._inductor import list_options

    chosen = {"realize_opcount_threshold": 60}
    return {"options": {name: value for name, value in chosen.items() if name in list_options()}}


def compiled(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Return ``torch.compile(function, **options)``, with kernels that store float8 as they should."""
    store_float8_right()
    kernel: Callable[..., R] = torch.compile(function, **options)
    return kernel


def store_float8_right() -> None:
    """Let inductor write minima and maxima without the instructions ``min.NaN`` and ``max.NaN``.

    Beside them Triton stores float8 values of a transposed tensor wrongly, in about a quarter of runs
    (github.com/triton-lang/triton/issues/11111). The values are the same: NaN wins over a number. torchao does the same
    in ``convert_to_float8_training``, which only its own layers go through. Code that is compiled already stays.
    """
    version: Any = torch.__version__  # compares with tuples
    if version < _FIRST or not torch.cuda.is_available():
        return
    from torch._inductor.codegen import triton

    overrides: Any = getattr(triton, "TritonOverrides", None)
    if not (hasattr(overrides, "minimum") and hasattr(overrides, "maximum")):
        raise ImportError(
            f"torch {torch.__version__} has moved `TritonOverrides`, so compiled kernels may store wrong float8 values."
            " Install a torch that this version of lightning_lowprec supports."
        )
    overrides.minimum, overrides.maximum = staticmethod(_minimum), staticmethod(_maximum)


def _minimum(a: Any, b: Any) -> str:
    return f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})"


def _maximum(a: Any, b: Any) -> str:
    return f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})"
