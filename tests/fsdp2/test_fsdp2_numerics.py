"""FP8 all-gather changes nothing but the bytes: against torchao by hand; two gloo ranks.

tests/fsdp2/test_two_ranks_as_one.py trains as one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

from lightning_lowprec import FP8TorchAO, parallelize
from tests.fsdp2.gathers import scales_of
from tests.fsdp2.models import Net, batch, full, loss_of
from tests.fsdp2.ranks import run

STEPS = 20
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def train(model, rank, after_step=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return full(model)


def sharded(mesh, fp8_all_gather, **options):
    model, plugin = Net(), FP8TorchAO(emulate=True, **options)
    parallelize(model, mesh, plugin, fp8_all_gather=fp8_all_gather, param_dtype=torch.float32)
    return model, scales_of(model)


def by_hand(mesh):
    """What a torchao user writes: convert with FP8 all-gather, shard blocks and root."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = convert_to_float8_training(Net(), config=config, module_filter_fn=lambda m, fqn: "lm_head" not in fqn)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def worker(rank):
    mesh, weights = init_device_mesh("cpu", (2,)), {}
    model, scales = sharded(mesh, True)
    weights["ours"] = train(model, rank)
    reductions = scales.reductions
    model, scales = sharded(mesh, True)
    scales.weights = []  # nothing to refresh: every weight reduces its own scale
    weights["a scale reduced per weight"] = train(model, rank)
    weights["float32 gathered"] = train(sharded(mesh, False)[0], rank)
    model = by_hand(mesh)
    precompute_float8_dynamic_scale_for_fsdp(model)
    weights["torchao by hand"] = train(model, rank, lambda: precompute_float8_dynamic_scale_for_fsdp(model))
    return weights, reductions


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def test_every_way_of_gathering_gives_the_same_bits(results):
    weights = dict(results[0][0])
    ours = weights.pop("ours")
    untrained = Net().state_dict()
    assert all(not torch.equal(ours[name], untrained[name]) for name in ours)
    assert results[0][1] == STEPS, "one reduction of scales per step"
    for way, other in [*weights.items(), ("the other rank", results[1][0]["ours"])]:
        assert ours.keys() == other.keys()
        for name in ours:
            assert torch.equal(ours[name], other[name]), (way, name)
