"""Tokens sorted by expert, some of them experts of other ranks."""

import torch

from lightning_lowprec.numerics.groups import group, spread

TOKENS, EXPERTS = 37, 5


def test_rows_without_meaning_reach_no_gradient():
    """Grouped kernels leave memory behind the last group as it was."""
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(2 * EXPERTS)[:2] for _ in range(TOKENS)])
    groups = group(index, EXPERTS, 16, some_absent=True)
    tokens = torch.randn(len(index), 4, requires_grad=True)
    rows = spread(tokens, groups)
    assert not rows[int(groups.ends[-1]) :].any()
    grad = torch.ones_like(rows)
    grad[int(groups.ends[-1]) :] = torch.nan
    rows.backward(grad)
    assert torch.equal(tokens.grad, (index < EXPERTS).sum(1, keepdim=True).expand(-1, 4).float())
