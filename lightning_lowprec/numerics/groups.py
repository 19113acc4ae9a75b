"""Sort tokens by expert and put the outputs back, without waiting for the device: all shapes are known beforehand.

    tokens   [T, K]   hidden states; each goes to k experts, so there are S = T * k pairs of token and expert
    rows     [P, K]   expert 0's tokens, zero rows, expert 1's tokens, zero rows, ..., rows that nobody reads
    outputs  [P, N]  ->  [S, N]: one row per pair, in the order of ``top_k_index``

The rows of each expert begin at a multiple of the alignment. With an alignment above 1 every expert has rows, be they
zero: CUTLASS's FP8 kernel for the weight gradient takes no empty group. So P = S + E * alignment, rounded up. How many
rows each expert has is known on the device alone: kernels for grouped GEMMs read ``Groups.ends`` there.

The rows behind the last expert's (and those of experts on other ranks) are never multiplied, so grouped GEMMs leave
memory without meaning there. :func:`collect` and the backward pass of :func:`spread` do not read it.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where the rows of each expert are."""

    ends: Tensor
    """[E] int32: the row behind the last row of each expert, zero rows included."""
    row: Tensor
    """[S] int64: the row of each pair of token and expert."""
    token: Tensor
    """[P] int64: the token of each row; T for a row without a token. ``expert``: the same, E without one."""
    expert: Tensor
    absent: Tensor | None
    """[S] bool: the pairs whose expert is on another rank; None if all experts are here."""


def group(top_k_index: Tensor, experts: int, alignment: int, *, some_absent: bool = False) -> Groups:
    """Return the groups of a batch, from the experts of each token: [T, k] int.

    A number from ``experts`` (E) on is an expert of another rank, which ``some_absent`` allows.
    """
    pairs, tokens = top_k_index.numel(), top_k_index.numel() // top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1).long(), stable=True)
    behind = torch.searchsorted(expert, torch.arange(experts, device=expert.device), right=True)
    counts = behind.diff(prepend=behind.new_zeros(1))
    least = alignment if alignment > 1 else 0
    padded = ((counts + alignment - 1) // alignment * alignment).clamp(min=least)
    ends = padded.cumsum(0)
    added = torch.nn.functional.pad(ends - counts.cumsum(0), (1, 0))  # zero rows before each expert's first, [E + 1]
    place = torch.arange(pairs, device=expert.device) + added[expert.clamp(max=experts)]
    total = -(-(pairs + experts * least) // alignment) * alignment
    token, here = order // top_k_index.shape[-1], expert < experts
    return Groups(
        ends=ends.to(torch.int32),
        row=torch.empty_like(place).index_copy(0, order, place),
        token=place.new_full((total,), tokens).index_copy(0, place, torch.where(here, token, tokens)),
        expert=place.new_full((total,), experts).index_copy(0, place, expert.clamp(max=experts)),
        absent=torch.empty_like(here).index_copy(0, order, ~here) if some_absent else None,
    )


def spread(tokens: Tensor, groups: Groups) -> Tensor:
    """[T, K] -> [P, K]: the rows of the experts; a row without a token is zero, and gets no gradient."""
    return _Spread.apply(tokens, groups.token, groups.row, groups.absent)  # type: ignore[no-any-return, no-untyped-call]


def collect(rows: Tensor, groups: Groups) -> Tensor:
    """[P, N] -> [S, N]: the row of each pair; zero for an expert of another rank."""
    return _Collect.apply(rows, groups.row, groups.absent)  # type: ignore[no-any-return, no-untyped-call]


def per_row(values: Tensor, groups: Groups) -> Tensor:
    """[E, N] -> [P, N]: the values of each row's expert, such as its bias; zero for a row without a token."""
    return torch.cat((values, values.new_zeros(1, values.shape[1])))[groups.expert]


@final
@torch.compiler.allow_in_graph
class _Spread(torch.autograd.Function):
    """Gather rows; the gradients of the rows of a token are summed in the order of the token's experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, row: Tensor, absent: Tensor | None) -> Tensor:
        ctx.save_for_backward(row, absent)
        ctx.tokens = tokens.shape[0]
        return torch.cat((tokens, tokens.new_zeros(1, tokens.shape[1]))).index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        row, absent = ctx.saved_tensors
        pairs = _read(grad_rows, row, absent)
        return pairs.view(ctx.tokens, -1, pairs.shape[1]).sum(dim=1), None, None, None


@final
@torch.compiler.allow_in_graph
class _Collect(torch.autograd.Function):
    """Gather the rows of the pairs; a row has at most one pair, or nobody reads it, so the gradients are copied."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row: Tensor, absent: Tensor | None) -> Tensor:
        ctx.save_for_backward(row)
        ctx.rows = rows.shape[0]
        return _read(rows, row, absent)

    @staticmethod
    def backward(ctx: Any, grad_pairs: Tensor) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return grad_pairs.new_zeros(ctx.rows, grad_pairs.shape[1]).index_copy(0, row, grad_pairs), None, None


def _read(rows: Tensor, row: Tensor, absent: Tensor | None) -> Tensor:
    pairs = rows.index_select(0, row)
    return pairs if absent is None else pairs.masked_fill(absent.unsqueeze(1), 0.0)
