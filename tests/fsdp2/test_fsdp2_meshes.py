"""Copies of a sharded model (HSDP) and tensor parallelism, on four gloo ranks, against one process.

tests/fsdp2/test_eight_bits.py shows that two copies train to the bits of one.
"""

import lightning as L
import pytest
import torch

from lightning_lowprec import FabricFSDP2Strategy
from tests.fsdp2.models import Net, batch, full, loss_of
from tests.fsdp2.ranks import run

STEPS = 3
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def fabric_for(precision, **options):
    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=FabricFSDP2Strategy(**options), precision=precision)
    fabric.launch()
    return fabric


def colwise_rowwise(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trained(fabric, data_rank):
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, batch(number, data_rank))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        loss_of(model, batch(0, data_rank))  # gathers once more, and frees the root
    return losses, full(model.module), fabric.strategy.distributed_sampler_kwargs, fabric.strategy.device_mesh.shape


def worker(rank):
    plan = {"tensor_parallel": colwise_rowwise, "tensor_parallel_size": 2}
    results = {
        "hsdp": trained(fabric_for("fp8-hybrid", replicate=2), rank),
        "tp": trained(fabric_for("fp8-hybrid", **plan), rank // 2),
        "tp in float32": trained(fabric_for("32-true", **plan), rank // 2),
    }
    fabric = fabric_for("32-true")
    model = fabric.setup_module(Net())
    results["one dimension"] = fabric.strategy.device_mesh.shape, len(list(model.parameters()))
    return results


def one_process(data_ranks: int, precision: str):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number in range(STEPS):
        for rank in range(data_ranks):
            fabric.backward(loss_of(model, batch(number, rank)) / data_ranks)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 4, tmp_path_factory.mktemp("ranks"))


def difference(one, other):
    start = Net().state_dict()
    update = max((other[name] - start[name]).abs().max() for name in start)
    return max((one[name] - other[name]).abs().max() for name in start) / update


def test_copies_agree_and_train_as_one_process(results):
    for rank in range(1, 4):
        assert all(torch.equal(w, results[rank]["hsdp"][1][k]) for k, w in results[0]["hsdp"][1].items())
    assert difference(results[0]["hsdp"][1], one_process(4, "fp8-hybrid")) < 0.01
    assert [results[rank]["hsdp"][2] for rank in range(4)] == [{"num_replicas": 4, "rank": rank} for rank in range(4)]
    assert results[0]["hsdp"][3] == (2, 2, 1)


def test_tensor_parallel_trains_as_one_process(results):
    for rank in range(4):
        assert results[rank]["tp"][2] == {"num_replicas": 2, "rank": rank // 2}
        assert all(torch.equal(w, results[rank]["tp"][1][k]) for k, w in results[0]["tp"][1].items())
    assert difference(results[0]["tp in float32"][1], one_process(2, "32-true")) < 1e-4
    # each rank of a tensor-parallel pair scales its own part of an activation, so FP8 is as close as FP8 is
    plain = one_process(2, "fp8-hybrid")
    assert difference(results[0]["tp"][1], plain) < 2 * difference(plain, one_process(2, "32-true"))
    assert results[0]["one dimension"] == ((4, 1), 15)
