"""Weights of codes (MS-AMP's O3) under FSDP2 on gloo processes, against the same training in one process."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from lightning_lowprec.checkpoints import optimizer_state
from tests.fsdp2.ranks import run
from tests.msamp.scaled_fsdp_runs import OPTIMIZERS, STEPS, Net, alone, decoded, same, scales, train, worker
from tests.quality import sqnr

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled-fsdp")
    found, states = {}, {}
    for kind in OPTIMIZERS:
        model, optimizer = alone(kind)
        train(model, optimizer, range(STEPS))
        named = {"state": {}, "param_groups": []}
        plain, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
        named["state"] = {names[i]: entry for i, entry in plain["state"].items()}
        named["param_groups"] = [{**g, "params": [names[i] for i in g["params"]]} for g in plain["param_groups"]]
        states[kind] = {"model": model.state_dict(), "optimizer": named}
        torch.save(states, folder / "states.pt")
        states = torch.load(folder / "states.pt")  # of its own memory
        found[kind] = {"state": decoded(model, optimizer)}
        found[kind]["state"] = pytree.tree_map_only(torch.Tensor, torch.clone, found[kind]["state"])
        train(model, optimizer, range(STEPS, STEPS + 3))
        found[kind] |= {"end": decoded(model, optimizer), "scales": scales(model)}
    return found, run(worker, 2, folder, folder / "states.pt", folder / "folder")


every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


@every_optimizer
def test_training_is_bit_for_bit_that_of_one_process(runs, kind):
    one, ranks = runs[0][kind], [rank[kind] for rank in runs[1]]
    assert same(ranks[0]["state"], one["state"])
    assert same(ranks[0]["end"], one["end"])
    assert ranks[0]["scales"] == ranks[1]["scales"] == one["scales"]


def test_a_gather_sends_one_byte_per_coded_element(runs):
    for rank in runs[1]:
        for fqn in ("blocks.0", "blocks.1"):
            coded, plain = 2 * 32 * 64, 32 + 32 + 64 + 32  # two weights; a norm's two vectors and two biases
            sent, calls = rank["adamw"]["traffic"][fqn], rank["adamw"]["calls"][fqn]
            assert calls == 2 * STEPS  # forward and backward
            assert sent == {torch.uint8: calls * (coded + 4 * plain) // 2}  # a rank puts in half of everything
        assert "float8" in rank["adamw"]["line"]


def test_a_step_takes_one_reduction_and_keeps_seven_bytes_less_the_gradient_per_rank(runs):
    for rank in runs[1]:
        assert rank["counted"]["calls"] == {"c10d::allreduce_": 1}
        # e4m3 weight, float16 master, e4m3 and float16 moments of half the elements; a few scalars
        assert rank["counted"]["bytes"] == pytest.approx((1 + 2 + 1 + 2) / 2, rel=0.02)


def test_gradients_of_different_batches_are_averaged(runs):
    """Half a batch per rank; what differs from the whole batch is the rounding of inputs to e4m3."""
    model, optimizer = alone()
    expected = {}
    train(
        model, optimizer, [0], after=lambda: expected.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    for rank in runs[1]:
        for name, gradient in rank["halves"].items():
            assert gradient.dtype == torch.float32
            assert sqnr(expected[name], gradient) > 30, name


@every_optimizer
@pytest.mark.parametrize("origin", ["resumed", "from one"])
def test_resume_is_bit_exact_from_these_ranks_and_from_one(runs, kind, origin):
    one, found = runs[0][kind], runs[1][0][origin][kind]
    assert same(found["start"], one["state"])
    assert same(found["end"], one["end"])


@every_optimizer
def test_one_process_resumes_what_two_ranks_saved(runs, kind):
    state = runs[1][0][kind]["state"]
    model, optimizer = alone(kind, seed=1)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(optimizer_state.numbered(state["optimizer"], model))
    assert same(decoded(model, optimizer), runs[0][kind]["state"])
    train(model, optimizer, range(STEPS, STEPS + 3))
    assert same(decoded(model, optimizer), runs[0][kind]["end"])


def test_the_state_dict_is_that_of_the_plain_model(runs):
    weights = runs[1][0]["adamw"]["state"]["model"]
    model = Net()
    assert {name: (v.shape, v.dtype) for name, v in weights.items()} == {
        name: (v.shape, torch.float32) for name, v in model.state_dict().items()
    }
    linear = nn.Linear(32, 64)
    linear.load_state_dict({name: weights[f"blocks.0.up.{name}"] for name in ("weight", "bias")})


def test_a_folder_of_shards_comes_back_bit_for_bit(runs):
    assert same(runs[1][0]["folder"]["saved"], runs[1][0]["folder"]["loaded"])


def test_what_is_not_finite_on_one_rank_leaves_the_scales_finite_and_equal(runs):
    (scales, weights), (other, _) = (rank["overflow"] for rank in runs[1])
    assert scales == other
    assert all(0 < value < float("inf") for pair in scales for value in pair)
    assert bool(weights["blocks.0.up.weight"][32, 0].isnan())  # the first row of rank 1
    assert bool(weights["blocks.0.up.weight"][:32].isfinite().all())
    assert bool(weights["blocks.0.down.weight"].isfinite().all())


def test_stochastic_rounding_moves_masters_on_every_rank_with_common_scales(runs):
    (scales, moved), (other, moved_too) = (rank["stochastic"] for rank in runs[1])
    assert scales == other
    # float16 numbers are 2**-14 (or twice that) apart there, and the first step of AdamW is 1e-5 long
    for part in (moved, moved_too):
        assert 0.8 * 1e-5 * 2**13 < part.float().mean().item() < 1.2 * 1e-5 * 2**14
    assert (moved & moved_too).float().mean().item() < 0.05  # the ranks do not share random bits: about 0.1**2


def test_what_does_not_run_is_said_before_anything_is_sharded(runs):
    for rank in runs[1]:
        o1, o2, uneven = rank["refused"]
        assert "O1 or O2), which do not run under FSDP2. Use O3" in o1 == o2
        assert "32 output features, which do not divide into 3 equal shards" in uneven


def test_a_shard_shows_values_and_takes_writes_with_a_common_scale(runs):
    for rank in runs[1]:
        found = rank["written"]
        assert found["read"]
        assert found["doubled"]
        assert torch.equal(found["row"], torch.tensor([[1.0], [2.0]]).expand(2, 32))
        assert found["scale"] == 2.0**7  # 448 / 2 = 224, rounded down to a power of two
        assert "keep=[...]" in found["lost"]
