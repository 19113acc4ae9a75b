"""Products of float8 and int8 codes, by names that are private to torch; `torch.py` has the list of these names.

``torch.nn.functional.scaled_mm`` calls another operation, ``aten._scaled_mm_v2``. torch 2.13's partitioner does not
count it among the products that a backward must not compute again, and torch's counter knows no FLOPs of it. Use the
public function from the version on in which both do (``torch/_functorch/partitioners.py``, ``utils/flop_counter.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """[M, K] @ [K, N] of float8 codes, times reciprocals of scales ([M, 1] and [1, N], or one each) -> [M, N].

    ``b`` lies in memory column by column. ``fast``: the sum may have fewer bits than float32.
    """
    return torch._scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast)


def scaled_grouped_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, ends: Tensor) -> Tensor:
    """Grouped product of float8_e4m3fn codes with a scale per row and column -> bf16, on Hopper and Blackwell.

    ``torch.nn.functional.scaled_grouped_mm`` does the same, and torch 2.11 cannot compile it.

    Args:
        a: [M, K], contiguous.
        b: [E, K, N], or [K, N] if the groups are parts of K; contiguous along K.
        inverse_a: what to multiply with: [M], or [E * M].
        inverse_b: the same: [E, N], or [E * N].
        ends: [E] int32.
    """
    return torch._scaled_grouped_mm(a, b, inverse_a, inverse_b, ends, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] of int8 -> [M, N] int32."""
    return torch._int_mm(a, b)
