"""Products of codes, and a mode that sees all products, by private names of torch; `torch.py` has their list.

``torch.nn.functional.scaled_mm`` calls another operation, ``aten._scaled_mm_v2``. torch's partitioner does not count it
among the products that a backward must not compute again, torch's counter knows no FLOPs of it, and DTensor has no rule
for it: so it is in 2.11.0, 2.13.0, 2.14.1 and 2.15.0. Use the public function from the version on in which that has
changed (``_functorch/partitioners.py``, ``utils/flop_counter.py``, ``distributed/tensor/_ops/_matrix_ops.py``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """[M, K] @ [K, N] of float8 codes, times reciprocals of scales ([M, 1] and [1, N], or one each) -> [M, N].

    ``b`` lies in memory column by column. ``fast``: the sum may have fewer bits than float32.
    """
    return torch._scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast)


def block_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, of_tiles: bool
) -> Tensor:
    """[M, K] @ [K, N] of float8_e4m3fn codes with a scale per block of 128 -> [M, N], by cuBLASLt on Hopper.

    Reciprocals of scales, which lie in memory column by column: ``inverse_a`` is [M, ceil(K / 128)], ``inverse_b`` is
    the same of N, or those of tiles, [ceil(K / 128), ceil(N / 128)] with rows filled up to a multiple of 4.
    """
    kinds = F.ScalingType
    kind = kinds.BlockWise128x128 if of_tiles else kinds.BlockWise1x128
    product: Tensor = F.scaled_mm(a, b, inverse_a, kinds.BlockWise1x128, inverse_b, kind, output_dtype=dtype)
    return product


def scaled_grouped_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, ends: Tensor) -> Tensor:
    """Grouped product of float8_e4m3fn codes with a scale per row and column -> bf16, on Hopper and Blackwell.

    ``torch.nn.functional.scaled_grouped_mm`` does the same, and torch 2.11 cannot compile it. ``a``: [M, K],
    contiguous; ``b``: [E, K, N], or [K, N] if the groups are parts of K, contiguous along K; what to multiply with,
    ``inverse_a``: [M] or [E * M], ``inverse_b``: [E, N] or [E * N]; ``ends``: [E] int32.
    """
    return torch._scaled_grouped_mm(a, b, inverse_a, inverse_b, ends, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] of int8 -> [M, N] int32."""
    return torch._int_mm(a, b)
