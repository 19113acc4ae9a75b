"""Gradients as float8 codes with one scale per 128 values, in the form in which ranks send them.

One row goes to one rank. A row of n values becomes ``row_bytes(n)`` bytes:

    ceil(n / 128) inv_scales, float32 | n codes, float8_e4m3fn | padding to a multiple of 16 bytes

    scale = 448 / amax of the block, so that the largest value of a block is stored exactly
    code  = float8_e4m3fn(value * scale)          value = code * inv_scale

A block may have the end of one parameter and the beginning of the next: values up to 2**15 times smaller than the
largest one of their block keep all bits. A block with inf or NaN has scale 1, and its amax in place of ``inv_scale``:
inf stays inf, NaN stays NaN, and no other value of the block is finite afterwards.

On CUDA one kernel encodes and one decodes, with the same bits. They move 5.03 bytes per float32 value to encode, and
12.3 to decode and sum the values of 8 ranks; torch's operations move 43.8 and 276 (`benchmarks/ledger/moved.py`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E4M3, encode
from lightning_lowprec.numerics.one_pass import is_simulated, kernels_run, on_device

BLOCK: Final = 128
"""Values that share a scale."""
LARGEST_SCALE: Final = 2.0**120
"""The scale of zeros; scale and inv_scale are normal float32 numbers."""
DEVICES = {"cuda"}
_INV_SCALE: Final = 4  # bytes
_ROW: Final = 16  # bytes of which a row is a multiple
BYTES_PER_VALUE: Final = 1 + _INV_SCALE / BLOCK
"""Bytes that are sent per value, for rows of many values."""


def row_bytes(values: int) -> int:
    """Return the bytes of a row of ``values`` values."""
    return -(-(_INV_SCALE * _blocks(values) + values) // _ROW) * _ROW


def to_bytes(values: Tensor) -> Tensor:
    """Return rows as bytes: (rows, n) float32, bfloat16 or float16, contiguous -> (rows, row_bytes(n)) uint8."""
    rows, n = values.shape
    sent = values.new_empty(rows, row_bytes(n), dtype=torch.uint8)
    if _by_kernel(values):
        _launch("encode_blocks", values, sent)
    elif values.numel():
        inv_scales, codes = _parts(sent, n)
        blocks = torch.nn.functional.pad(values.float(), (0, -n % BLOCK)).view(rows, _blocks(n), BLOCK)
        amax = blocks.abs().amax(-1, keepdim=True)
        finite = amax.isfinite()
        exact = torch.full_like(amax, E4M3.max).div_(amax)  # a number divided by a tensor would be rounded twice
        scale = torch.where(finite, exact.clamp_(max=LARGEST_SCALE), 1.0)
        inv_scales.copy_(torch.where(finite, scale.reciprocal(), amax).squeeze(-1))
        codes.copy_(encode(blocks, scale, E4M3.dtype).view(rows, -1)[:, :n])
    return sent


def decode_sum_(total: Tensor, sent: Tensor, factor: float = 1.0) -> None:
    """Write the sum over ranks, computed in float32 in the order of the ranks, times ``factor``.

    ``total``: (rows, n) float32, bfloat16 or float16, contiguous; overwritten. ``sent``: (ranks, rows, row_bytes(n))
    uint8, contiguous. ``factor``: 1 / ranks for a mean.
    """
    if _by_kernel(total):
        _launch("decode_sum", total, sent, factor)
    elif total.numel():
        summed = torch.zeros(1, 1, device=total.device)
        for inv_scales, codes in (_parts(of_rank, total.shape[1]) for of_rank in sent):
            summed = summed + codes.float() * inv_scales.repeat_interleave(BLOCK, 1)[:, : total.shape[1]]
        total.copy_(summed * factor)


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _by_kernel(values: Tensor) -> bool:
    return values.device.type in DEVICES and values.numel() > 0 and kernels_run()


def _launch(name: str, values: Tensor, sent: Tensor, *factor: float) -> None:
    """Launch a kernel for ``values``, (rows, n), and the bytes of them."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import kernels

    rows, n = values.shape
    bf16 = values.dtype == torch.bfloat16
    grid = (-(-n // (BLOCK * kernels.BLOCKS.value)), rows)
    bits = values.view(torch.int16) if bf16 else values
    ranks = {} if name == "encode_blocks" else {"RANKS": sent.shape[0]}
    with on_device(values.device):
        getattr(kernels, name)[grid](
            bits, sent, sent.view(torch.float32), n, sent.shape[-1], *factor, **ranks, BF16=bf16,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def _parts(sent: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return views of bytes: inv_scales, (..., blocks) float32, and codes, (..., n) float8_e4m3fn."""
    start = _INV_SCALE * _blocks(n)
    return sent[..., :start].view(torch.float32), sent[..., start : start + n].view(E4M3.dtype)
