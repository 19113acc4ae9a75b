"""Tokens to experts and back, against transformers' own experts, without Transformer Engine."""

import pytest
import torch
from torch.nn.functional import linear

from lightning_lowprec.te.fusion.routing import combine, gather, mix_experts, route

TRANSFORMERS = pytest.importorskip("transformers")
E, T, K, TOP = 4, 13, 16, 2


def tiny(intermediate=24, **options):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = TRANSFORMERS.MixtralConfig(
        hidden_size=K, intermediate_size=intermediate, num_local_experts=E, num_attention_heads=2, **options
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = MixtralExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    return experts


def grouped(rows, splits, stacked):
    """What te.GroupedLinear computes: [P, K] and [E, N, K] -> [P, N]."""
    return torch.cat([linear(part, weight) for part, weight in zip(rows.split(splits), stacked, strict=True)])


def batch(tokens=T, used=E):
    torch.manual_seed(1)
    scores = torch.randn(tokens, used).softmax(-1)
    weights, index = scores.topk(TOP, dim=-1)
    return torch.randn(tokens, K), index, weights


def mixed(experts, hidden, index, weights, alignment, seen=None):
    def expert(rows, splits):
        if seen is not None:
            seen.append(splits)
        inner = experts._apply_gate(grouped(rows, splits, experts.gate_up_proj))
        return grouped(inner, splits, experts.down_proj)

    return mix_experts(hidden, index, weights, num_experts=E, alignment=alignment, expert=expert)


@pytest.mark.parametrize("alignment", [1, 16, 32])
@pytest.mark.parametrize("used", [E, TOP])  # two experts without a token
def test_the_same_as_eager_experts(alignment, used):
    experts, seen = tiny(), []
    hidden, index, weights = batch(used=used)
    results = []
    for function in (experts, lambda *args: mixed(experts, *args, alignment, seen)):
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts.zero_grad()
        output = function(leaves[0], index, leaves[1])
        output.pow(2).sum().backward()
        gradients = [p.grad.clone() for p in (*leaves, *experts.parameters())]
        results.append([output.detach(), *gradients])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert all(split % alignment == 0 for split in seen[0])
    assert sum(seen[0]) >= T * TOP


def test_a_route_by_hand():
    index = torch.tensor([[2, 0], [0, 3], [2, 0]])
    plan = route(index, E, 4)
    assert plan.splits == [4, 0, 4, 4]
    assert plan.choice.tolist() == [1, 2, 5, 0, 4, 3]  # of [2, 0, 0, 3, 2, 0]: expert 0 thrice, 2 twice, 3 once
    assert plan.row.tolist() == [0, 1, 2, 4, 5, 8]
    rows = gather(torch.tensor([[1.0], [2.0], [3.0]]), plan, 2)
    assert rows.flatten().tolist() == [1, 2, 3, 0, 1, 3, 0, 0, 2, 0, 0, 0]
    outputs = combine(10 * rows, torch.tensor([[0.5, 0.25], [1.0, 2.0], [1.0, 1.0]]), plan)
    assert outputs.flatten().tolist() == [7.5, 60, 60]


def test_experts_of_another_rank_add_nothing():
    experts = tiny()
    hidden, index, weights = batch()
    elsewhere = index.clone()
    elsewhere[:, 1] = E
    silent = weights.clone()
    silent[:, 1] = 0
    found = mixed(experts, hidden, elsewhere, weights, 16)
    torch.testing.assert_close(found, mixed(experts, hidden, index, silent, 16))


def test_no_tokens_and_other_dtypes():
    experts = tiny()
    hidden, index, weights = batch(tokens=0)
    assert mixed(experts, hidden, index, weights, 16).shape == (0, K)
    hidden, index, weights = batch()
    assert mixed(experts.bfloat16(), hidden.bfloat16(), index, weights, 16).dtype == torch.bfloat16
