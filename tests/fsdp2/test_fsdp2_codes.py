"""A shard is encoded once per optimizer step, however often it is gathered; one process."""

import pytest
import torch
from torch import distributed as dist

from lightning_lowprec.torchao.linear import TorchAOWire
from tests.fsdp2.models import batch, loss_of
from tests.fsdp2.test_fsdp2_numerics import sharded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def encoded(monkeypatch):
    """The shapes of the shards that were encoded."""
    shapes, encode = [], TorchAOWire.encode

    def counting(self, values, scale):
        shapes.append(tuple(values.shape))
        return encode(self, values, scale)

    monkeypatch.setattr(TorchAOWire, "encode", counting)
    return shapes


def steps(model, count, micro_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(count):
        for micro_batch in range(micro_batches):
            loss_of(model, batch(step * micro_batches + micro_batch, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_eight_micro_batches_encode_each_shard_once(mesh, encoded):
    model, made = sharded(mesh, True)
    steps(model, 2, 8)
    assert len(made.scales.weights) > 1
    assert len(encoded) == 2 * len(made.scales.weights)


def test_a_write_between_micro_batches_is_seen(mesh, encoded):
    model, made = sharded(mesh, True)
    weights = made.scales.weights
    first = loss_of(model, batch(0, 0)).item()
    assert loss_of(model, batch(0, 0)).item() == first
    with torch.no_grad():
        weights[0].mul_(1.5)
    assert loss_of(model, batch(0, 0)).item() != first
    assert len(encoded) == 2 * len(weights), "all scales are made anew after a write"


def test_a_kernel_says_that_it_has_written(mesh):
    model, made = sharded(mesh, True)
    loss_of(model, batch(0, 0))
    assert not made.scales.stale
    made.scales.weights[0].to_local().note_written()
    assert made.scales.stale
