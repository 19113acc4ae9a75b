"""Lightning's FSDPStrategy objects on two gloo ranks: what they become trains as the same choices made with ours."""

import pytest

from tests.fsdp2.fsdp_runs import worker
from tests.fsdp2.ranks import run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("fsdp"))


STEPS = 3
MADE = [
    "pytorch FSDPStrategy",
    "fabric FSDPStrategy",
    "fsdp2 FSDP2Strategy",
    "fsdp2 FabricFSDP2Strategy",
]


@pytest.mark.parametrize("loop", ["by_trainer", "by_fabric"])
def test_lightnings_object_and_ours_of_either_flavour_train_alike(seen, loop):
    for rank in seen:
        one, *others = [rank[f"{loop} {made}"] for made in MADE]
        assert others == [one] * 3
        assert one["groups"] == ["", "blocks.0", "blocks.1"]
        assert one["layouts"] == ["(Shard(dim=0),)"]
        assert one["gathers"] == {"": STEPS, "blocks.0": STEPS, "blocks.1": STEPS}, "SHARD_GRAD_OP gathers once a step"
        assert "torch.uint8" in one["dtypes"], "the wire dtype of groups with FP8 weights"
    losses = [rank[f"{loop} {MADE[0]}"]["losses"] for rank in seen]
    assert losses[0] != losses[1], "the ranks saw the same data"


def test_hybrid_sharding(seen):
    for rank in seen:
        two_copies = rank["hybrid (2, 1)"]
        assert (two_copies["meshes"], two_copies["layouts"]) == ([(2, 1)], ["(Replicate(), Shard(dim=0))"])
        for one_copy in (rank["hybrid (1, 2)"], rank["hybrid nodes"]):  # there is one node
            assert (one_copy["meshes"], one_copy["layouts"]) == ([(2,)], ["(Shard(dim=0),)"])
            assert one_copy["gathers"]["blocks.0"] == 2 * STEPS, "HYBRID_SHARD frees weights after forward"


def test_what_only_the_run_shows_is_refused_then(seen):
    for rank in seen:
        expected = "`shards=4` with `replicate=2` and `tensor_parallel_size=1` needs 8 processes, and there are 2."
        assert rank["mesh of 8"] == expected


def test_an_explicit_mixed_precision(seen):
    for rank in seen:
        assert rank["mixed precision"]["dtypes"] == ["torch.bfloat16"]
        assert rank["mixed precision"]["buffer"] == "torch.bfloat16"


def test_sync_module_states(seen):
    assert [rank["synced True"] for rank in seen] == [True, True]
    assert [rank["synced False"] for rank in seen] == [False, False], "the ranks had the same model anyway"


def test_the_trainer_sees_the_signatures_of_the_users_steps(seen):
    for rank in seen:
        assert rank["signatures"] == ["loss 0 0", "loss 1 0"]
        assert rank["parameters"] == ["(batch)", "(batch, batch_idx, dataloader_idx=0)"]
        assert rank["overridden"] == ["training_step", "validation_step"], "a step that is not the user's is left alone"
        assert rank["sharded after evaluation"]
