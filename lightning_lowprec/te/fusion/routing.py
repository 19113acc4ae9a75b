"""Sort tokens by expert, pad the rows of each expert to whole tiles, and put the outputs back in the order of tokens.

    tokens   [T, K]      hidden states; each goes to k experts
    rows     [P, K]      expert 0's tokens, zero rows, expert 1's tokens, zero rows, ...; P = sum of ``splits``
    outputs  [P, K]  ->  [T, K]: each token's k outputs, weighted and summed

Pure tensor arithmetic, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Route(NamedTuple):
    """The order of the rows of a batch."""

    splits: list[int]
    """Rows of each expert, multiples of the alignment; 0 for an expert without tokens."""
    choice: Tensor
    """[S], the index in ``top_k_index.reshape(-1)`` of each pair of token and expert, sorted by expert."""
    row: Tensor
    """[S], the row of each pair."""


def route(top_k_index: Tensor, num_experts: int, alignment: int) -> Route:
    """Compute the order of the rows of a batch.

    The number of rows of each expert comes to the host in one copy, for which the host waits: the grouped GEMMs of
    Transformer Engine take these numbers from the host, and the rows need memory of a known size. So each mixture waits
    once per forward, and cannot be captured in a CUDA graph.

    Args:
        top_k_index: [T, k], int: the experts of each token. A number from ``num_experts`` on is an expert of another
            rank, whose output is zero here.
        num_experts: E.
        alignment: the number of rows of each expert becomes a multiple of this.
    """
    experts, choice = torch.sort(top_k_index.reshape(-1), stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + alignment - 1) // alignment * alignment
    skipped = torch.cumsum(padded - counts, 0) - (padded - counts)  # zero rows before each expert's first
    *splits, here = torch.cat((padded, ends[-1:])).tolist()
    row = torch.arange(here, device=experts.device) + skipped[experts[:here]]
    return Route(splits, choice[:here], row)


def gather(tokens: Tensor, plan: Route, top_k: int) -> Tensor:
    """[T, K] -> [P, K]. Rows of zeros change no amax, stay zero in experts without biases, and get no gradient."""
    rows = tokens.new_zeros(sum(plan.splits), tokens.shape[-1])
    return rows.index_copy(0, plan.row, tokens[plan.choice // top_k])


def combine(outputs: Tensor, top_k_weights: Tensor, plan: Route) -> Tensor:
    """[P, K], [T, k] -> [T, K], summed in the order of ``top_k_weights``, which gives the same sum at every run.

    The result has the dtype to which outputs and weights promote.
    """
    weighted = outputs[plan.row] * top_k_weights.reshape(-1)[plan.choice].unsqueeze(-1)
    per_choice = weighted.new_zeros(top_k_weights.numel(), outputs.shape[-1])
    per_choice = per_choice.index_copy(0, plan.choice, weighted)
    return per_choice.view(*top_k_weights.shape, outputs.shape[-1]).sum(dim=-2)


def mix_experts(
    tokens: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    alignment: int,
    expert: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """Run all experts on their tokens: [T, K], [T, k], [T, k] -> [T, K], dtype of ``tokens``.

    ``expert`` computes all experts at once: rows [P, K] and their splits -> [P, K]. For the rest see :func:`route`.
    """
    plan = route(top_k_index, num_experts, alignment)
    if not any(plan.splits):  # no token, or none for the experts of this rank
        return torch.zeros_like(tokens)
    outputs = expert(gather(tokens, plan, top_k_index.shape[-1]), plan.splits)
    return combine(outputs, top_k_weights, plan).to(tokens.dtype)
