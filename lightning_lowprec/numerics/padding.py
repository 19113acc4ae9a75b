"""Pad the rows of a batch for kernels that take only multiples of 16 or 32 rows."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[*, K] -> [M, K]: flatten the leading dimensions and append rows of zeros until M is a multiple of ``multiple``.

    The result may be a view of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def cut_rows(output: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [*, N]: undo :func:`pad_rows` for the output of a linear layer that was given the padded ``x``."""
    tokens = x.numel() // x.shape[-1]
    return output[:tokens].reshape(*x.shape[:-1], output.shape[-1])
