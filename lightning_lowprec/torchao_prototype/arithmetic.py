"""The arithmetic of a layer's products: how operands become codes, and how codes are multiplied."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["int8", "int8_stochastic", "mxfp8", "mxfp8_emulated"]
"""``int8_stochastic`` rounds gradients stochastically; ``mxfp8_emulated`` multiplies dequantised codes."""


class Arithmetic(Protocol):
    """Encode matrices along the dimension that a product sums over, and multiply the codes."""

    def encode(self, matrix: Tensor, *, along_rows: bool, is_gradient: bool = False) -> Any:
        """Return codes whose scales are those of parts of rows, or of columns.

        Args:
            matrix: (A, B) float.
            along_rows: True: each scale belongs to a part of a row, and the codes are (A, B). False: to a part of a
                column, and the codes are (B, A).
            is_gradient: whether the matrix is the gradient of the output.
        """
        ...

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, *, rows_first: bool = False) -> Tensor:
        """Return a @ b.T of codes (M, K), (N, K) -> (M, N) of ``dtype``.

        Args:
            a: codes from :meth:`encode`.
            b: codes from :meth:`encode`.
            dtype: of the result, and of what was encoded.
            rows_first: multiply by the scales of ``a`` before those of ``b``, where each multiplication rounds.
        """
        ...
