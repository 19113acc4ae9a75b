"""Run elementwise arithmetic in one pass over the memory: on CUDA one compiled kernel, elsewhere eagerly.

Eager code runs a kernel for every operation, and every kernel reads and writes all elements: to encode a float32 weight
takes 21 to 35 bytes per element. One kernel reads 4 bytes and writes 1.

The compiled code takes flat tensors of any size. So there are two graphs of a function per combination of dtypes, one
for calls under autocast and one for others, and none per shape: after one training step nothing is compiled any more.
``TORCHDYNAMO_DISABLE=1`` in the environment runs everything eagerly.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_lowprec.hardware import architecture
from lightning_lowprec.private.inductor import compiled

R = TypeVar("R")


def in_one_pass(
    function: Callable[..., Tensor], values: Tensor, scale: Tensor, *constants: Any, out: Tensor | None = None
) -> Tensor:
    """Return ``function(values, scale, *constants)``: (...), scalar float32 -> (...). Call without gradients.

    ``function`` stands in a module and is elementwise in ``values``. A graph is compiled per set of ``constants``. With
    ``out``, contiguous, the kernel writes there, and ``out`` is returned.
    """
    if not values.is_cuda:
        result = function(values, scale, *constants)
        return result if out is None else out.copy_(result)
    flat = values.reshape(-1).data  # no view any more: the compiler would look at the shape of what a view shows
    if out is None:
        return _compiled(function)(flat, scale, *constants).view(values.shape)
    _compiled_into(function)(out.view(-1).data, function, flat, scale, *constants)
    return out


def rows_in_one_pass(function: Callable[..., Any], rows: Tensor, *arguments: Any) -> Any:
    """Return ``function(rows, *arguments)``: ``rows`` is (M, N). Call without gradients.

    ``function`` stands in a module and has reductions along N and elementwise operations. There is one graph for the
    first M, and one for all others, because kernels that know N read the rows less often.
    """
    if not rows.is_cuda:
        return function(rows, *arguments)
    kinds = tuple((part.dtype, part.ndim) if isinstance(part, Tensor) else part for part in arguments)
    kernel = _compiled_for_rows(function, rows.dtype, rows.shape[1], kinds)
    # no views any more: the compiler would look at the shape of what a view shows
    return kernel(*(part.data if isinstance(part, Tensor) else part for part in (rows, *arguments)))


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return compiled(function, fullgraph=True, dynamic=True)


@functools.cache
def _compiled_into(function: Callable[..., Tensor]) -> Callable[..., None]:
    return compiled(_copied(_write), fullgraph=True, dynamic=True)


def _write(out: Tensor, function: Callable[..., Tensor], *arguments: Any) -> None:
    out.copy_(function(*arguments))


def compiled_on_cuda(function: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function of float8 codes, possibly with reductions: run it compiled where :func:`compiles` says so.

    The first argument decides. Sizes are dynamic: no shape compiles anew. Inside of code that is being compiled the
    function becomes a part of that code. Call without gradients.
    """

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> R:
        # neither empty tensors, nor the tensors of a compiler that traces
        if (
            torch.compiler.is_compiling()
            or type(first) is not Tensor
            or not first.numel()
            or not compiles(first.device)
        ):
            return function(first, *rest)
        kernel: Callable[..., R] = _compiled_any(function)
        return kernel(first, *rest)

    return run


@functools.cache
def compiles(device: torch.device) -> bool:
    """Return whether Triton compiles casts to float8_e4m3fn: on GPUs that multiply it. Others cast eagerly."""
    return device.type == "cuda" and architecture(device).fp8 == "e4m3fn"


@functools.cache
def _compiled_any(function: Callable[..., R]) -> Callable[..., R]:
    return compiled(function, dynamic=True)


@functools.cache
def _compiled_for_rows(function: Any, *kind: Any) -> Callable[..., Any]:
    """Compile ``function`` for one ``kind``."""
    return compiled(_copied(function), fullgraph=True)


def _copied(function: Any) -> Any:
    """Return a copy of ``function`` with a code object of its own: the compiler allows few graphs per code object."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
