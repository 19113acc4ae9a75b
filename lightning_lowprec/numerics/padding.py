"""Pad the rows of a batch for kernels that take only multiples of 16 or 32 rows."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_rows(x: Tensor, multiple: int, *, repeat_last: bool = False) -> Tensor:
    """[*, K] -> [M, K]: flatten the leading dimensions and append rows of zeros until M is a multiple of ``multiple``.

    ``repeat_last`` appends detached copies of the last row. A copy changes no amax of any function that is computed row
    by row; a row of zeros can change it (a LayerNorm makes its bias of zeros). The result may be a view of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % multiple
    if missing == 0:
        return rows
    if repeat_last:
        return torch.cat((rows, rows[-1:].detach().expand(missing, -1)))
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))


def cut_rows(output: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [*, N]: undo :func:`pad_rows` for the output of a linear layer that was given the padded ``x``."""
    tokens = x.numel() // x.shape[-1]
    return output[:tokens].reshape(*x.shape[:-1], output.shape[-1])
