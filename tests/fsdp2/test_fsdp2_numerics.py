"""FP8 all-gather changes nothing but the bytes: against torchao by hand; two gloo ranks."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from lightning_lowprec import FP8TorchAO, parallelize
from tests.fsdp2.models import Net, batch, full, loss_of, same
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
    shards = [parameter.to_local() for parameter in model.parameters()]
    return model, next((shard._scales for shard in shards if hasattr(shard, "_scales")), None)


def by_hand(mesh):
    """What a torchao user writes: convert with FP8 all-gather, shard blocks and root."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = convert_to_float8_training(Net(), config=config, module_filter_fn=lambda m, fqn: "lm_head" not in fqn)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def every_way_of_gathering_gives_the_same_bits(rank):
    mesh = init_device_mesh("cpu", (2,))
    model, scales = sharded(mesh, True)
    ours = train(model, rank)
    untrained = Net().state_dict()
    assert all(not torch.equal(ours[name], untrained[name]) for name in ours)
    assert scales.reductions == STEPS, "one reduction of scales per step"
    model, scales = sharded(mesh, True)
    scales.weights = []  # nothing to refresh: every weight reduces its own scale
    assert same(ours, train(model, rank)), "a scale reduced per weight"
    assert same(ours, train(sharded(mesh, False)[0], rank)), "float32 gathered"
    model = by_hand(mesh)
    precompute_float8_dynamic_scale_for_fsdp(model)
    assert same(ours, train(model, rank, lambda: precompute_float8_dynamic_scale_for_fsdp(model))), "torchao by hand"
    weights = [None, None]
    dist.all_gather_object(weights, ours)
    assert same(*weights)


def test_two_ranks(tmp_path):
    run(every_way_of_gathering_gives_the_same_bits, 2, tmp_path)
