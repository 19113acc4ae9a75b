"""A fused model under FSDP2 on two gloo ranks: its engines compute with the gathered weights."""

from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_lowprec.te.fusion import engines, fuse
from tests.fsdp2.ranks import run
from tests.te.decoders import linears, make, ragged
from tests.te.onnx_path import plain_torch

BATCHES = [ragged(2, 7), ragged(3, 5)]


def loss_of(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss


def steps(model):
    """The gradients of a first step of SGD, and the loss after it; each rank has a batch of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = BATCHES[dist.get_rank()]
    with plain_torch(model):
        loss_of(model, batch).backward()
        grads = {fqn: p.grad.full_tensor().clone() for fqn, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        return grads, float(loss_of(model, batch))


def worker(rank, name):
    plain, fused = make(name).train(), make(name).train()
    with patch.object(torch.cuda, "is_available", return_value=True):
        fuse(fused, may_convert=linears(fused))
    mesh = dist.init_device_mesh("cpu", (2,))
    for model in (plain, fused):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    found, wanted = steps(fused), steps(plain)
    seen = {name: engine._is_fsdp2 for name, engine in engines(fused).items()}
    keys = list(get_model_state_dict(fused)) == list(get_model_state_dict(plain))
    copies = [value for m in fused.modules() for value in vars(m) if value.startswith("_te")]
    return found, wanted, seen, keys, copies


@pytest.mark.filterwarnings("default")
def test_gradients_and_losses_of_two_ranks(tmp_path):
    for found, wanted, seen, keys, left_behind in run(worker, 2, tmp_path, "llama"):
        assert found[0].keys() == wanted[0].keys()
        for fqn, grad in wanted[0].items():
            torch.testing.assert_close(found[0][fqn], grad, rtol=1e-4, atol=1e-5)
        assert found[1] == pytest.approx(wanted[1], rel=1e-5)
        assert len(seen) == 4
        assert all(seen.values())
        assert keys
        assert left_behind == []
