"""What `skip_nonfinite=True` adds to a step: one check, one read by the host, and copies of delayed scales."""

import gc
from collections import Counter

import lightning as L
import pytest
import torch

from benchmarks.ledger.recorder import recording
from benchmarks.ledger.step import launches
from benchmarks.rivals import models
from lightning_lowprec import FP8TE, FP8TorchAO, HalfMixed
from lightning_lowprec.precision import loss_scale
from lightning_lowprec.private import transformer_engine

DEVICE = torch.device("cuda")


def run(plugin, clip=False):
    """(kernels, waits) of the third step of the toy model."""
    gc.collect()
    transformer_engine.manager().reset()  # of the models of earlier tests: their scales would be renewed too
    torch.cuda.empty_cache()
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    model = fabric.setup_module(models.build(models.TOY, DEVICE))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=True))
    (batch,) = models.batches(models.TOY, 4, DEVICE, count=1)

    def step():
        fabric.backward(model(*batch))
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with recording() as log:
        step()
    return launches(log), [record.name for record in log.waits()]


NAMES = {
    "half": lambda **options: HalfMixed(options.pop("base", "bf16"), **options),
    "master": lambda **options: HalfMixed(options.pop("base", "bf16"), master_weights=True, **options),
    "torchao": lambda **options: FP8TorchAO(compile=False, **options),
    "te": lambda **options: FP8TE(**options),
}
ADDED = {"half": 4, "torchao": 4, "te": 5}
"""Two scalars are filled, all gradients are checked by one kernel, the host reads a flag; "te" copies its scales."""


@pytest.fixture
def steps_are_made(monkeypatch):
    """The flag that the host reads has no value here: what lies in that memory may say that a step is skipped."""
    read = loss_scale._Gradients.read

    def read_and_step(gradients):
        read(gradients)
        gradients.skips = False
        return False

    monkeypatch.setattr(loss_scale._Gradients, "read", read_and_step)


@pytest.mark.usefixtures("steps_are_made")
@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_asks_for_one_check_and_waits_once_as_in_fp16(name, clip):
    make = NAMES[name]
    (plain, never), (fp16, in_fp16), (found, waits) = (
        run(make(**options), clip) for options in ({}, {"base": "fp16"}, {"skip_nonfinite": True})
    )
    assert never == []
    assert waits == in_fp16 == ["D2H", "cudaStreamSynchronize"]
    assert len(found) <= len(fp16)
    added = list((Counter(found) - Counter(plain)).elements())
    checks = [kernel for kernel in added if "non_finite_check" in kernel or "LpNormFunctor" in kernel]
    assert len(checks) == 1
    if name in ADDED and not clip:
        assert len(added) == ADDED[name]
        assert len(found) == len(plain) + ADDED[name]
