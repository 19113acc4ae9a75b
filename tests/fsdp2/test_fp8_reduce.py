"""Gradients reduced in float8 on four gloo ranks: bytes, bounds of the rounding, NaN and inf, every kind of mesh."""

import math

import pytest
import torch

from lightning_lowprec.fsdp2.traffic import Fp8ReduceScatter
from tests.fsdp2.fp8_reduce_runs import RANKS, Odd, local_gradients, worker
from tests.fsdp2.parallel_runs import pipeline_of_one
from tests.fsdp2.ranks import run

pytestmark = pytest.mark.distributed
GROUPS = {"blocks.0": "blocks.0", "blocks.1": "blocks.1"}  # everything else is the root's


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, RANKS, tmp_path_factory.mktemp("fp8_reduce"))


def group_of(name):
    return GROUPS.get(".".join(name.split(".")[:2]), "")


def rounding(values, largest):
    """Half a step of float8_e4m3fn with scale 448 / amax: relative, or of the numbers near zero."""
    return values.abs() * 2.0**-4 + largest / 448 * 2.0**-10


def bounds(gradients):
    """By name: the mean over ranks, and how far from it a reduction may be that rounds each rank's values once."""
    names = gradients[0]
    largest = [
        {name: max(g[other].abs().max() for other in names if group_of(other) == group_of(name)) for name in names}
        for g in gradients
    ]
    means = {name: torch.stack([g[name] for g in gradients]).double().mean(0) for name in names}
    moved = {
        name: sum(rounding(g[name].double(), top[name]) for g, top in zip(gradients, largest, strict=True))
        / len(gradients)
        for name in names
    }
    return means, moved


def in_bounds(found, gradients, second=False):
    means, moved = bounds(gradients)
    assert found.keys() == means.keys()
    for name, mean in means.items():
        most = moved[name] * (1 + 1e-3) + 1e-6 * mean.abs().max()
        if second:  # the mean is rounded once more
            top = max(m.abs().max() for other, m in means.items() if group_of(other) == group_of(name))
            most = most + rounding(mean.abs() + most, top * 1.1)
        error = (found[name].double() - mean).abs()
        assert (error <= most).all(), name
        assert error.max() > 1e-4 * mean.abs().max(), f"{name} was not rounded"


def test_shards_have_the_mean_rounded_once_per_rank(results):
    for rank in results:
        in_bounds(rank["ways"]["shards"]["gradients"], local_gradients(4))
        assert rank["ways"]["shards"]["dtypes"] == {"torch.float32"}


def test_tensor_parallel_ranks_reduce_over_their_data_ranks(results):
    for rank in results:
        in_bounds(rank["ways"]["tensor parallel"]["gradients"], local_gradients(2))


@pytest.mark.parametrize("way", ["copies", "copies only"])
def test_copies_have_the_same_bits(results, way):
    """Within a copy sums are float32, so the sums of a copy are rounded, and then the mean."""
    locals_ = local_gradients(4)
    if way == "copies":  # a copy is two neighbouring ranks
        locals_ = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in (locals_[:2], locals_[2:])]
    for rank in results:
        in_bounds(rank["ways"][way]["gradients"], locals_, second=True)
    shards = 2 if way == "copies" else 1
    for one, other in ((0, shards), (shards - 1, 2 * shards - 1)):
        pairs = zip(results[one]["ways"][way]["local"], results[other]["ways"][way]["local"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("way", "ranks"), [("shards", 4), ("tensor parallel", 2)])
def test_the_bytes_of_a_reduce_scatter(results, way, ranks):
    """1.03 (N - 1) / N bytes per trained parameter, where float32 has 4; rows that do not divide are padded."""
    for rank in results:
        seen = rank["ways"][way]
        assert seen["calls"] == 3, "two blocks and the root"
        assert seen["wire"] == {("all_to_all_single", "torch.uint8"): seen["sent"]}
        assert 1.031 <= seen["sent"] / seen["values"] <= 1.031 + 3 * 20 * (ranks - 1) / seen["values"]
        own = sum(p.numel() for p in Odd().parameters() if p.requires_grad)
        if way == "shards":
            padding = 3 * 64 + 64 + 1  # 33 rows are cut as 36; 7 rows, and 7 numbers, as 8
            assert seen["values"] == (own + padding) * 3 // 4


def test_the_bytes_between_copies(results):
    """2 x 1.03 (c - 1) / c bytes per parameter of a shard; within a copy FSDP2 reduces in float32."""
    for rank in results:
        seen = rank["ways"]["copies"]
        assert not [kind for kind in seen["wire"] if kind[0] == "all_reduce"]
        assert 1.03 < seen["sent"] / seen["values"] < 1.05
        assert seen["wire"]["all_to_all_single", "torch.uint8"] == seen["sent"] / 2, "the other half is gathered"
        assert "all-reduce between copies: float8" in seen["line"]
        assert "0.26x of float32" in seen["line"]
    assert "reduce-scatter: float8, " in results[0]["ways"]["shards"]["line"]


def test_micro_batches_without_communication_are_reduced_once(results):
    for rank in results:
        assert rank["ways"]["two batches, copies"]["calls"] == 3
        locals_ = local_gradients(4, steps=(0, 1))
        pairs = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in (locals_[:2], locals_[2:])]
        in_bounds(rank["ways"]["two batches, copies"]["gradients"], pairs, second=True)


@pytest.mark.parametrize("mesh", ["", ", copies"])
def test_a_divide_factor_of_the_user_counts(results, mesh):
    """Divided by 2, not by 4: twice the mean, with the same bits because 2 is a power of two."""
    for rank in results:
        mean = rank["ways"]["copies" if mesh else "shards"]["gradients"]
        for name, found in rank["ways"][f"divided by 2{mesh}"]["gradients"].items():
            torch.testing.assert_close(found, 2 * mean[name], rtol=0, atol=0)


def test_the_buffers_may_be_bfloat16(results):
    """Values are rounded to bfloat16 before and after: 2**-8 each."""
    for rank in results:
        means, moved = bounds(local_gradients(4))
        for name, found in rank["ways"]["bf16 buffers"]["gradients"].items():
            most = moved[name] * 1.02 + 2.0**-7 * means[name].abs().max()
            assert ((found.double() - means[name]).abs() <= most).all(), name


@pytest.mark.parametrize("way", ["nan", "inf with copies"])
def test_a_lost_number_of_one_rank_skips_the_step_on_all(results, way):
    for rank in results:
        finite, unchanged = rank["lost"][way]
        assert not finite["back.weight"]
        assert finite["blocks.0.up.weight"], "another group"
        assert unchanged


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3", "bf16-lean"])
def test_trainings_follow_those_that_reduce_in_float32(results, precision):
    start = Odd(rows=32).state_dict()
    for rank in results:
        ours, reference = rank["trainings"][precision]
        moved = math.sqrt(sum((reference[k].float() - start[k]).square().sum() for k in start))
        apart = math.sqrt(sum((reference[k].float() - ours[k].float()).square().sum() for k in start))
        assert 0 < apart < {"fp8-hybrid": 0.1, "msamp-o3": 0.2, "bf16-lean": 0.3}[precision] * moved
        for name, weight in results[0]["trainings"][precision][0].items():
            assert torch.equal(weight, ours[name])


def test_the_trainer_trains_as_fabric_does(results):
    for rank in results:
        by_trainer, by_fabric = rank["trainer and fabric"]
        assert all(torch.equal(w, by_fabric[name]) for name, w in by_trainer.items())


def test_stages_of_a_pipeline_reduce_over_their_data_ranks(results):
    one, other = (pipeline_of_one("bf16", data_rank=rank)[1] for rank in range(2))
    names = set()
    for rank in results:
        names |= rank["pipeline"].keys()
        for name, found in rank["pipeline"].items():
            mean = (one[name] + other[name]) / 2
            noise = (found - mean).square().sum() / mean.square().sum()
            assert 10 * torch.log10(noise) < -28, name
    assert names == one.keys()


def test_other_reductions_raise():
    class Alone:
        def size(self):
            return 1

    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"got the reduction .*MAX; expected SUM, AVG or PREMUL_SUM"):
        Fp8ReduceScatter()(x, x, Alone(), torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX))
    with pytest.raises(ValueError, match="Use `fp8_reduce=False`"):
        Fp8ReduceScatter()(x, x, Alone(), torch.distributed.ReduceOp.SUM, async_op=True)
