"""Run arithmetic in one pass over the memory: on CUDA one kernel, compiled by torch or of our own, elsewhere eagerly.

Eager code runs a kernel for every operation, and every kernel reads and writes all elements: to encode a float32 weight
takes 21 to 35 bytes per element. One kernel reads 4 bytes and writes 1.

The compiled code takes flat tensors of any size. So there are two graphs of a function per combination of dtypes, one
for calls under autocast and one for others, and none per shape: after one training step nothing is compiled any more.
``TORCHDYNAMO_DISABLE=1`` in the environment runs everything eagerly.
"""

import functools
import os
import shutil
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from lightning_lowprec.extras import replaced
from lightning_lowprec.hardware import architecture
from lightning_lowprec.messages import warn
from lightning_lowprec.private.torch_inductor import compiled

R = TypeVar("R")


def in_one_pass(
    function: Callable[..., Tensor], values: Tensor, scale: Tensor, *constants: object, out: Tensor | None = None
) -> Tensor:
    """Return ``function(values, scale, *constants)``: (...), scalar float32 -> (...). Call without gradients.

    ``function`` stands in a module and is elementwise in ``values``. With ``out``, contiguous, the kernel writes there.
    """
    if not values.is_cuda:
        result = function(values, scale, *constants)
        return result if out is None else out.copy_(result)
    flat = values.reshape(-1).data  # no view any more: the compiler would look at the shape of what a view shows
    if out is None:
        return _compiled(function)(flat, scale, *constants).view(values.shape)
    _compiled_into(function)(out.view(-1).data, function, flat, scale, *constants)
    return out


def rows_in_one_pass(function: Callable[..., Any], rows: Tensor, *arguments: object) -> Any:
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


def _write(out: Tensor, function: Callable[..., Tensor], *arguments: object) -> None:
    out.copy_(function(*arguments))


def compiled_on_cuda(function: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function of float8 codes, possibly with reductions: run it compiled where :func:`compiles` says so.

    The first argument decides. Sizes are dynamic: no shape compiles anew. Inside of code that is being compiled the
    function becomes a part of that code. Call without gradients.
    """

    @functools.wraps(function)
    def run(first: Tensor, *rest: object) -> R:
        traced = torch.compiler.is_compiling() or type(first) is not Tensor  # the tensors of a compiler
        if traced or not first.numel() or not compiles(first.device):
            return function(first, *rest)
        tiles = [part for part in rest if isinstance(part, tuple)]
        kind = (first.dtype, first.is_contiguous(), torch.is_autocast_enabled("cuda")) if tiles else ()
        kernel: Callable[..., R] = _compiled_any(function, *tiles, *kind)
        # neither views nor parameters: the compiler would make other graphs for them
        return kernel(*(part.data if isinstance(part, Tensor) else part for part in (first, *rest)))

    return run


@functools.cache
def compiles(device: torch.device) -> bool:
    """Return whether Triton compiles casts to float8_e4m3fn: on GPUs that multiply it. Others cast eagerly."""
    return device.type == "cuda" and architecture(device).fp8 == "e4m3fn"


@functools.cache
def _compiled_any(function: Callable[..., R], *kind: object) -> Callable[..., R]:
    """Each kind has graphs of its own, for square matrices and ragged edges; torch allows eight for a function."""
    return compiled(_copied(function) if kind else function, dynamic=True)


@functools.cache
def _compiled_for_rows(function: object, *kind: object) -> Callable[..., object]:
    return compiled(_copied(function), fullgraph=True)


def _copied(function: Any) -> Any:
    """Return a copy of ``function`` with a code object of its own: the compiler allows few graphs per code object."""
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ---- kernels of our own, by Triton


@final
class _Simulated:
    """Whether tensors have no values, so that kernels are chosen and not launched."""

    now = False


def simulated() -> AbstractContextManager[None]:
    """Choose kernels as on a GPU, and launch none: to count the memory of a step."""
    return replaced(_Simulated, "now", True)


def is_simulated() -> bool:
    """Return whether kernels are not launched."""
    return _Simulated.now


def kernels_run() -> bool:
    """Return whether Triton kernels run; warn once if they do not."""
    return is_simulated() or _kernels_run()


@functools.cache
def _kernels_run() -> bool:
    reason = None
    compilers = (os.environ.get("CC"), "clang", "gcc")
    if find_spec("triton") is None:
        reason = "Triton is not installed"
    elif not any(shutil.which(compiler) for compiler in compilers if compiler):
        reason = "there is no C compiler, which Triton needs"
    if reason is not None:
        warn(
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
