"""Weights of codes (MS-AMP's O3) in two shards of FSDP2, also of two copies: what a rank alone would do otherwise."""

import pytest
import torch
from torch.nn import functional as F

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import set_values_, values_of
from tests.fsdp2 import toy
from tests.fsdp2.ranks import parts, run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def set_up(copies=1):
    fabric, model, optimizer = toy.setup(MSAMP("O3"), 2 * copies, replicate=copies)
    return fabric, model.module, optimizer, [p for p in model.parameters() if hasattr(p, "msamp_state")]


def step(fabric, model, optimizer, after=lambda: None):
    fabric.backward(F.cross_entropy(model(toy.X), toy.Y))
    after()
    optimizer.step()
    optimizer.zero_grad()


def what_is_not_finite_on_one_rank_leaves_the_scales_finite_and_equal(rank):
    """A gradient of rank 1's shard is inf, and another's NaN."""
    fabric, model, optimizer, coded = set_up()
    step(fabric, model, optimizer)

    def spoil():
        if rank == 1:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")
            model.blocks[1].up.weight.grad.to_local()[0, 0] = float("nan")

    step(fabric, model, optimizer, after=spoil)
    scales = [scale.item() for p in coded for scale in (p.msamp_state.scale, p.msamp_state.e4m3_scale)]
    assert scales == fabric.broadcast(scales)
    assert all(0 < scale < float("inf") for scale in scales)
    weights = toy.full(dict(model.state_dict()))
    assert bool(weights["blocks.0.up.weight"][32, 0].isnan())  # the first row of rank 1
    assert bool(weights["blocks.0.up.weight"][:32].isfinite().all())
    assert bool(weights["blocks.0.down.weight"].isfinite().all())


def a_shard_shows_values_and_takes_writes_with_a_common_scale(rank):
    """Writes by code that does not know codes: each is a collective."""
    (_, model, _, _), shard = set_up(copies=2), rank % 2
    weight = model.blocks[0].up.weight
    before = values_of(weight).full_tensor()
    assert torch.equal(weight.detach().full_tensor(), before)
    with torch.no_grad():
        weight.mul_(2.0)
        assert torch.equal(values_of(weight).full_tensor(), 2 * before)
        weight.to_local()[0] = float(shard + 1)
        rows = torch.tensor([[1.0], [2.0]]).expand(2, 32)
        assert torch.equal(values_of(weight).full_tensor()[[0, 32]], rows)
        assert weight.msamp_state.e4m3_scale.item() == 2.0**7  # 448 / 2 = 224, rounded down to a power of two
        with pytest.raises(RuntimeError, match=r"would be lost.*keep=\[\.\.\.\]"):
            weight.mul_(1 + 1e-6 * shard)  # one shard's values are lost: all ranks raise
        set_values_(weight, -values_of(weight))
    assert torch.equal(values_of(weight).full_tensor()[[0, 32]], -rows)


@parts(
    (what_is_not_finite_on_one_rank_leaves_the_scales_finite_and_equal, 2),
    (a_shard_shows_values_and_takes_writes_with_a_common_scale, 4),
)
def test_ranks(part, tmp_path):
    run(*part, tmp_path)
