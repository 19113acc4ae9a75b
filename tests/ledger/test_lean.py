"""The lean names on CUDA: bytes per parameter at rest and in the step, a launch per weight, and no wait."""

import gc

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.ledger.recorder import recording
from lightning_lowprec import HalfMixed
from lightning_lowprec.masters.config import LEAN, LEAN_SR, MasterConfig

LAYERS, WIDTH = 4, 2048
WEIGHT = WIDTH * WIDTH
EXPONENTS = 2 / 256  # bytes per parameter, of two moments
SMALL = 1_000_000


def held_now():
    """The bytes that are allocated, without cuBLAS's workspaces and what other tests have left behind."""
    for _ in range(3):  # some reference cycles take more than one round
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("config", "held"),
    [(LEAN, 6), (LEAN_SR, 4), (MasterConfig.of("8bit"), 6)],
    ids=["bf16-lean", "bf16-lean-sr", "bf16-8bit"],
)
def test_bytes_launches_and_waits(config, held):
    """Above what is held, the backward has one gradient and what autograd makes of the next one; a step has all."""
    before = held_now()
    torch.cuda.empty_cache()
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", master_weights=config))
    with torch.device("cuda"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    x = torch.zeros(16, WIDTH, dtype=torch.bfloat16, device="cuda")

    def step():
        fabric.backward(model(x).float().sum())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    count = LAYERS * WEIGHT
    rest = held_now() - before
    # an earlier test's tensors, less than SMALL, may be freed in between
    assert abs(rest - (held + EXPONENTS) * count) <= SMALL
    step()  # cuBLAS's workspaces are there again
    workspaces = torch.cuda.memory_allocated() - before - rest
    torch.cuda.reset_peak_memory_stats()
    with recording() as log:
        step()
    grown = torch.cuda.max_memory_allocated() - before - rest - workspaces
    gradients = 1 if config.update == "backward" else LAYERS
    assert gradients * 2 * WEIGHT <= grown <= (gradients + 1) * 2 * WEIGHT + SMALL
    launches = [record for record in log.of("kernel") if "step_parameters" in record.name]
    assert len(launches) == (LAYERS if config.update == "backward" else 1)
    assert not log.waits()
