"""A monitor on the null GPU: nothing between samplings; one wait and few kernels at a sampling, under every backend."""

import gc

import lightning as L
import pytest
import torch

from benchmarks.ledger.recorder import recording
from benchmarks.rivals import models
from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor

DEVICE = torch.device("cuda")
PLUGINS = {
    "torchao": lambda: FP8TorchAO(compile=False),
    "torchao, traced": lambda: FP8TorchAO(compile={"backend": "aot_eager"}),
    "torchao rowwise": lambda: FP8TorchAO("rowwise", compile=False),
    "msamp": lambda: MSAMP("O2", compile=False),
    **{f"te {recipe}": (lambda recipe=recipe: FP8TE(recipe)) for recipe in ("delayed", "current", "block")},
}
REHEARSED = {"torchao rowwise", "te current"}
"""Scales of one kind per backend stand for the others; those of Transformer Engine's blocks are of another."""


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rehearsed if name in REHEARSED else ()) for name in PLUGINS]
)
def test_a_sampling_costs_a_hundredth_of_a_hundred_steps(name):
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()  # memory of other tests is not zero, and sizes are read from memory
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=PLUGINS[name]())
    bare = models.build(models.TOY, DEVICE)
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), fused=True))
    (batch,) = models.batches(models.TOY, 4, DEVICE, count=1)
    monitor = NumericsMonitor(every=100)

    def step(number=None):
        with recording() as log:
            if number is not None:
                monitor.step(model, number)
            fabric.backward(model(*batch))
            optimizer.step()
            optimizer.zero_grad()
        return [(r.what, r.name) for r in log.of("kernel", "gemm", "memcpy", "memset")], len(log.waits())

    for _ in range(3):
        step()
    plain = step()
    step(0)  # the first sampling loads kernels
    monitor.finish()
    sampling = step(100)
    with recording() as log:
        monitor.finish()
    assert [record.what for record in log.waits()] == ["memcpy", "sync"]  # one copy to the host, and its end
    assert sampling[1] == plain[1]
    assert [step(number) for number in (101, 102)] == [plain] * 2
    own = len(sampling[0]) - len(plain[0]) + len(log.of("kernel"))
    assert monitor.missing == {}
    # compiled blocks run one micro-batch in eager code
    assert 0 < own <= (2 if "traced" in name else 1) * len(plain[0])
