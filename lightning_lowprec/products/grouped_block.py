"""Grouped products of codes with a scale per block of 128, each as a Linear of :mod:`block` computes it.

    [P, A] rows times [E, C, A]   -> [P, C]       the rows of each group by its matrix
    [P, A] rows times [P, C] rows -> [E, A, C]    summed over the rows of each group

The rows of each group begin at multiples of 128. So no block belongs to two groups, and all rows are encoded at once.
The host has to know where groups end, to multiply one by one: torch (2.11 to 2.13) has no grouped product of these
codes, and torchao 0.18 has DeepGEMM's, another package, whose groups the host reads too.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.numerics.weight_rounding import BLOCK
from lightning_lowprec.products.arithmetic import Codes
from lightning_lowprec.products.block import Block


def encode_stack(weight: Tensor, how: Block) -> tuple[Tensor, Tensor]:
    """[E, A, C] any float -> codes [E, A, C], and the scales of the tiles of one expert after the other."""
    missing = -weight.shape[1] % BLOCK
    padded = F.pad(weight.detach(), (0, 0, 0, missing)) if missing else weight.detach()  # else a copy
    codes, scale = how.encoded(padded.flatten(0, 1), "weight")
    return codes.view(padded.shape)[:, : weight.shape[1]].contiguous(), scale


def block_product(rows: Tensor, stack: Sequence[Tensor], ends: Tensor, how: Block, *, across: bool) -> Tensor:
    """[P, A], [E, C, A] by :func:`encode_stack`, or ``across`` [E, A, C] -> [P, C]; ``ends``: [E] int32, on CPU."""
    codes, scale = stack
    scale = scale.view(len(codes), -1, scale.shape[1])
    if across:
        codes, scale = codes.mT.contiguous(), scale.mT.contiguous()
    left = how.operand(rows, "input", rows.dtype).rows()
    return _product(*left, codes, scale, ends, rows.dtype, str(how.emulate))  # type: ignore[no-any-return]


def block_sums(left: Tensor, right: Tensor, ends: Tensor, how: Block) -> Tensor:
    """[P, A], [P, C] -> [E, A, C]; ``ends``: [E] int32, on CPU."""
    a, b = (how.operand(rows, "input", rows.dtype).columns() for rows in (left, right))
    return _product(*a, *b, ends, left.dtype, str(how.emulate))  # type: ignore[no-any-return]


# one operation, since a compiler does not know how many rows a group has
@torch.library.custom_op("lightning_lowprec::grouped_block_product", mutates_args=())
def _product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype, emulate: str
) -> Tensor:
    words: Any = {"True": True, "False": False}
    how = Block(emulate=words.get(emulate, emulate))
    parts, start = [], 0
    for group, end in enumerate(ends.tolist()):
        if b.dim() == 3:
            left, right = Codes(a[start:end], scale_a[start:end]), Codes(b[group], scale_b[group])
        else:
            blocks = slice(start // BLOCK, end // BLOCK)
            pairs = (a, scale_a), (b, scale_b)
            left, right = (Codes(codes[:, start:end].contiguous(), scale[:, blocks]) for codes, scale in pairs)
        parts.append(how.multiply(left, right, dtype, "forward"))
        start = end
    if b.dim() == 2:
        return torch.stack(parts)
    return torch.cat([*parts, a.new_zeros(len(a) - start, b.shape[1], dtype=dtype)])  # rows that nobody reads


@_product.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype, emulate: str) -> Tensor:
    shape = (len(a), b.shape[1]) if b.dim() == 3 else (len(ends), len(a), len(b))
    return a.new_empty(shape, dtype=dtype)
