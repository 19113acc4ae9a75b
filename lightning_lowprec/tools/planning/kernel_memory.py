"""The memory that kernels of CUDA take inside an operation, which no operation shows: attention, and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from lightning_lowprec.private.fake_attention import FLASH_BACKWARD

CUBLAS: Final = {9: 32 << 20}
"""Bytes that torch keeps for cuBLAS per thread after the first product, by major compute capability."""
_THREADS: Final = 2  # the forward and the backward
CUBLAS_ELSEWHERE: Final = (8 << 20) + (128 << 10)
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32  # flash attention rounds lengths and head dimensions up to these
_FLOAT32: Final = 4


def cublas(capability: tuple[int, int]) -> int:
    """Return the bytes that torch keeps for cuBLAS."""
    return _THREADS * CUBLAS.get(capability[0], CUBLAS_ELSEWHERE)


def inside(func: Any, args: Any) -> int:
    """Return the bytes that an operation takes and gives back before the operation ends."""
    found = _INSIDE.get(func)
    return 0 if found is None else found(*args)


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """The gradient of the query in float32, one number per row, and per query head the gradients of key and value."""
    batch, heads, length, width = query.shape
    rows = -(-length // _FLASH_ROWS) * _FLASH_ROWS
    columns = -(-width // _FLASH_COLUMNS) * _FLASH_COLUMNS
    own = _FLOAT32 * batch * heads * rows * (columns + 1)
    if key.shape[1] == heads:
        return own
    return own + 2 * batch * heads * key.shape[2] * width * key.element_size()


_INSIDE: Final[Mapping[Any, Callable[..., int]]] = {
    FLASH_BACKWARD: _flash_backward,
}
