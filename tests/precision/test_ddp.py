"""What one rank of two meets under DDP, an overflow or a NaN, costs both ranks the step."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from tests.fsdp2.ranks import run

SKIPPING = {
    "bf16-master": lambda: HalfMixed("bf16", master_weights=True, skip_nonfinite=True),
    "torchao": lambda: FP8TorchAO(skip_nonfinite=True),
    "msamp": lambda: MSAMP("O2", skip_nonfinite=True),
}
SCALED = ("fp16-master", "fp8-hybrid-fp16")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def set_up(**how):
    fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=2, **how)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    held = [p for p in net.parameters() if p is not net[2].bias]  # what no optimizer holds fits the buckets of DDP, too
    return fabric, net, *fabric.setup(net, torch.optim.AdamW(held, lr=0.1))


def flat(net):
    return torch.cat([p.detach().float().flatten() for p in net.parameters()])


def overflows(rank, name):
    """Return weights before and after a step in which rank 1 overflows, and by what the scale has changed."""
    fabric, net, module, optimizer = set_up(precision=name)
    before, scaler = flat(net), fabric.strategy.precision.scaler
    scale = scaler.scale
    fabric.backward(module(torch.full((4, 16), float("inf") if rank else 1.0)).float().mean())
    optimizer.step()
    return before, flat(net), scaler.scale / scale


def skips(rank, name, nan):
    """Return the weights of a run whose second batch has a NaN on rank 1, or is not there, and the skipped steps."""
    fabric, net, module, optimizer = set_up(plugins=SKIPPING[name]())
    batches = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(rank))
    for number, batch in enumerate(batches):
        if number == 1 and not nan:
            continue
        batch = batch * float("nan") if number == 1 and rank else batch
        optimizer.zero_grad()
        fabric.backward(module(batch).float().square().mean())
        optimizer.step()
    return flat(net), fabric.strategy.precision.skipped_steps


def on_each_rank(rank):
    skipped = {(name, nan): skips(rank, name, nan) for name in SKIPPING for nan in (True, False)}
    return {name: overflows(rank, name) for name in SCALED}, skipped


def test_what_one_rank_meets_costs_both_the_step(tmp_path):
    ranks = run(on_each_rank, 2, tmp_path)
    for overflowed, skipped in ranks:
        for before, after, factor in overflowed.values():
            assert torch.equal(before, after)
            assert factor == 0.5
        for name in SKIPPING:
            (weights, count), (expected, none) = skipped[name, True], skipped[name, False]
            assert (count, none) == (1, 0)
            assert torch.equal(weights, expected), "the skipped step left a trace"
            assert torch.equal(weights, ranks[0][1][name, True][0]), "ranks differ"
