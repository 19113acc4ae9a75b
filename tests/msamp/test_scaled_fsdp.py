"""Weights of codes (MS-AMP's O3) on two ranks of FSDP2: what a rank alone would do otherwise.

tests/fsdp2/test_two_ranks_as_one.py trains them to the bits of one process, and test_resume_fabric.py resumes.
"""

import pytest
import torch
from torch.nn import functional as F

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import set_values_, values_of
from tests.fsdp2 import toy
from tests.fsdp2.ranks import run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
GRAPHS = {"backend": "aot_eager"}


def set_up(**options):
    fabric, model, optimizer = toy.setup(
        MSAMP("O3", **options), 2, make=lambda m: torch.optim.AdamW(m.parameters(), 1e-5)
    )
    return fabric, model.module, optimizer, [p for p in model.parameters() if hasattr(p, "msamp_state")]


def step(fabric, model, optimizer, after=lambda: None):
    fabric.backward(F.cross_entropy(model(toy.X), toy.Y))
    after()
    optimizer.step()
    optimizer.zero_grad()


def scales(coded):
    return [(p.msamp_state.scale.item(), p.msamp_state.e4m3_scale.item()) for p in coded]


def overflow(rank):
    fabric, model, optimizer, coded = set_up()
    step(fabric, model, optimizer)

    def spoil():
        if rank == 1:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")
            model.blocks[1].up.weight.grad.to_local()[0, 0] = float("nan")

    step(fabric, model, optimizer, after=spoil)
    return scales(coded), toy.full(dict(model.state_dict()))


def compiled(rank):
    found = []
    for options, precision in (({}, {"compile": False}), ({"compile": GRAPHS}, {}), ({}, {"compile": GRAPHS})):
        fabric, model, optimizer = toy.setup(MSAMP("O3", **precision), 2, **options)
        toy.train(fabric, model, optimizer, range(2), 2)
        found.append(toy.everything(model, optimizer, fabric.strategy.precision))
    return [toy.differences(found[0], other) for other in found[1:]]


def written(rank):
    """Writes to a sharded weight by code that does not know codes: each is a collective."""
    _, model, _, _ = set_up()
    weight = model.blocks[0].up.weight
    before = values_of(weight).full_tensor()
    found = {"read": torch.equal(weight.detach().full_tensor(), before)}
    with torch.no_grad():
        weight.mul_(2.0)
        found["doubled"] = torch.equal(values_of(weight).full_tensor(), 2 * before)
        weight.to_local()[0] = float(rank + 1)
        found["row"] = values_of(weight).full_tensor()[[0, 32]]
        found["scale"] = weight.msamp_state.e4m3_scale.item()
        with pytest.raises(RuntimeError, match="would be lost") as error:
            weight.mul_(1 + 1e-6 * rank)  # one rank's values are lost: all ranks raise
        found["lost"] = str(error.value)
        set_values_(weight, -values_of(weight))
        found["negated"] = values_of(weight).full_tensor()[[0, 32]]
    return found


def worker(rank):
    for option in ("cpu_offload", "sync_module_states"):
        with pytest.raises(ValueError, match=f"^`{option}=True` does not go with weights that are kept as codes"):
            toy.setup("msamp-o3", 2, **{option: True})
    with pytest.raises(ValueError, match=r"`fp8_all_gather=False` is not possible: .* gathered as they are"):
        toy.setup("msamp-o3", 2, fp8_all_gather=False)
    return {part.__name__: part(rank) for part in (overflow, compiled, written)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def test_what_is_not_finite_on_one_rank_leaves_the_scales_finite_and_equal(ranks):
    (scales, weights), (other, _) = (rank["overflow"] for rank in ranks)
    assert scales == other
    assert all(0 < value < float("inf") for pair in scales for value in pair)
    assert bool(weights["blocks.0.up.weight"][32, 0].isnan())  # the first row of rank 1
    assert bool(weights["blocks.0.up.weight"][:32].isfinite().all())
    assert bool(weights["blocks.0.down.weight"].isfinite().all())


def test_compiled_blocks_train_to_the_same_bits(ranks):
    assert not any(found for rank in ranks for found in rank["compiled"])


def test_a_shard_shows_values_and_takes_writes_with_a_common_scale(ranks):
    rows = torch.tensor([[1.0], [2.0]]).expand(2, 32)
    for found in (rank["written"] for rank in ranks):
        assert found["read"]
        assert found["doubled"]
        assert torch.equal(found["row"], rows)
        assert torch.equal(found["negated"], -rows)
        assert found["scale"] == 2.0**7  # 448 / 2 = 224, rounded down to a power of two
        assert "keep=[...]" in found["lost"]
