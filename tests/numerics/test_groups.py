"""Tokens sorted by expert: places, gradients, experts of other ranks, and no look at values on the host."""

import pytest
import torch

from lightning_lowprec.numerics.groups import collect, group, spread

TOKENS, TOP_K, EXPERTS = 37, 2, 5
ROUTES = {
    "mixed": lambda: torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]),
    "two experts take all": lambda: torch.tensor([[3, 1]]).expand(TOKENS, 2),
    "half on another rank": lambda: torch.stack([torch.randperm(2 * EXPERTS)[:TOP_K] for _ in range(TOKENS)]),
    "all on another rank": lambda: torch.full((TOKENS, TOP_K), EXPERTS),
}


def routed(name, alignment):
    torch.manual_seed(0)
    index = ROUTES[name]()
    return index, group(index, EXPERTS, alignment, some_absent="rank" in name)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("name", ROUTES)
def test_rows_lie_with_their_experts_and_come_back(name, alignment):
    index, groups = routed(name, alignment)
    tokens = torch.randn(len(index), 8)
    rows = spread(tokens, groups)
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        ours = tokens[(index == expert).any(dim=1)]
        assert torch.equal(rows[start : start + len(ours)], ours)  # in the order of the tokens
        assert not rows[start + len(ours) : end].any()
        assert end % alignment == 0
        assert end > start or alignment == 1  # CUTLASS's FP8 kernel takes no empty group
        start = end
    assert len(rows) < index.numel() + (EXPERTS + 1) * alignment
    present = (index < EXPERTS).reshape(-1, 1)
    assert torch.equal(collect(rows, groups), tokens.repeat_interleave(TOP_K, 0) * present)


def test_rows_without_meaning_reach_no_gradient():
    """Grouped kernels leave memory behind the last group as it was."""
    index, groups = routed("half on another rank", 16)
    tokens = torch.randn(len(index), 4, requires_grad=True)
    rows = spread(tokens, groups)
    grad = torch.ones_like(rows)
    grad[int(groups.ends[-1]) :] = torch.nan
    rows.backward(grad)
    assert torch.equal(tokens.grad, (index < EXPERTS).sum(1, keepdim=True).expand(-1, 4).float())
