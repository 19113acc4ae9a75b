"""FP8 layers in torch's pipelines, of whole and of sharded stages, on gloo ranks: the bits of one process."""

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from lightning_lowprec import parallelize
from tests.fsdp2.models import Net, batch
from tests.fsdp2.ranks import run
from tests.fsdp2.test_parallelisms import CPU, converted, cross_entropy, gradients, precisions

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
BATCHES = 4


class Stage(nn.Module):
    """One half of a Net, with its names; without a number the whole Net."""

    def __init__(self, number=None):
        super().__init__()
        net = Net()
        numbers = range(2) if number is None else [number]
        self.embedding = net.embedding if 0 in numbers else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): net.blocks[i] for i in numbers})
        self.lm_head = net.lm_head if 1 in numbers else nn.Identity()

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.lm_head(x)


def long_batch():
    """Inputs and targets of 8 sequences: 4 micro-batches of 2."""
    tokens = torch.cat([batch(step, 0) for step in range(2)])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def set_up(precision, model, mesh):
    """Convert a stage, and shard it if there is a mesh: the ranks that have the same stage."""
    if mesh is None:
        return converted(precision, model)
    plugin = precisions()[precision]()
    is_block = lambda fqn, module: fqn.startswith("blocks.") and fqn.count(".") == 1  # noqa: E731
    return plugin, parallelize(model, mesh, plugin, wrap=is_block)


def pipeline(number, precision, schedule, mesh=None):
    plugin, model = set_up(precision, Stage(number), mesh)
    stage = pipelining.PipelineStage(model, number, 2, CPU)
    runs = getattr(pipelining, schedule)(stage, n_microbatches=BATCHES, loss_fn=cross_entropy)
    (inputs, targets), losses = long_batch(), []
    with plugin.forward_context():
        runs.step(*([inputs] if number == 0 else []), **({"target": targets, "losses": losses} if number else {}))
    return [loss.item() for loss in losses], gradients(model)


def pipeline_of_one(precision, mesh=None):
    plugin, model = set_up(precision, Stage(), mesh)
    losses = []
    for inputs, targets in zip(*(tensor.chunk(BATCHES) for tensor in long_batch()), strict=True):
        with plugin.forward_context():
            losses.append(cross_entropy(model(inputs), targets))
        losses[-1].backward()
    found = {name: grad / BATCHES for name, grad in gradients(model).items()}
    return [loss.item() for loss in losses], found


def worker(rank):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "data"))["data"]  # this rank, by itself
    return {
        (precision, schedule, sharded): (
            pipeline(rank, precision, schedule, mesh),
            pipeline_of_one(precision, mesh),
        )
        for precision in precisions()
        for schedule, sharded, mesh in (("Schedule1F1B", False, None), ("ScheduleGPipe", True, alone))
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole stages", "sharded stages"])
@pytest.mark.parametrize("precision", ["tensorwise", "rowwise", "msamp-o3", "bf16"])
def test_a_pipeline_computes_the_bits_of_one_process(results, precision, sharded):
    schedule = "ScheduleGPipe" if sharded else "Schedule1F1B"
    names = set()
    for rank in results:
        (losses, grads), (expected_losses, expected) = rank[precision, schedule, sharded]
        assert losses in ([], expected_losses)
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
        names |= grads.keys()
    assert names == expected.keys()
    assert results[1][precision, schedule, sharded][0][0] == expected_losses
