"""``memory``: bytes per parameter by precision and optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_lane import bytes_held, measure, models
from benchmarks.gpu_lane.contenders import MAIN, Contender, contenders
from benchmarks.gpu_lane.item import Item, missing_library
from benchmarks.gpu_lane.running import Job
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.setups import lightning

FP32 = "lightning 32-true"
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
WITH_LOW_BIT = ("lightning bf16-true", MAIN)
BATCH = 2
STATE = ("weights", "gradients", "masters", "optimizer")
"""What a run holds between steps, gradients included; the optimizer's part is its state: AdamW's moments."""


class Memory:
    """The part; every precision with AdamW first, then torchao's optimizers."""

    name = "memory"

    def items(self, settings: Settings) -> list[Item]:
        device = settings.torch_device
        everyone = _everyone()
        found = [Item(key=f"{c.key} + AdamW", seconds=15.0, limit=120.0, missing=c.missing(device)) for c in everyone]
        no_optimizers = missing_library(("torchao.optim",))
        found += [
            Item(key=f"{name} + {optimizer}", seconds=15.0, limit=120.0, missing=no_optimizers)
            for name in WITH_LOW_BIT
            for optimizer in LOW_BIT
        ]
        return [_shortened(item, settings) for item in found]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        name, _, optimizer = key.rpartition(" + ")
        contender = next(c for c in _everyone() if c.key == name)
        shape = models.TOY if settings.smoke else models.SHAPES["memory"]
        return bytes_of(contender, optimizer, shape, settings)


def _shortened(item: Item, settings: Settings) -> Item:
    return Item(key=item.key, seconds=1.0, limit=item.limit, missing=item.missing) if settings.smoke else item


def _everyone() -> list[Contender]:
    """No contender twice: compiled ones where there is an eager one besides."""
    fp32 = Contender(key=FP32, setup=partial(lightning, precision="32-true", compiled=False), needs=("lightning",))
    return [fp32, *(c for c in contenders() if "whole model" not in c.key and "(again)" not in c.key)]


def bytes_of(contender: Contender, optimizer: str, shape: models.Shape, settings: Settings) -> dict[str, Any]:
    """Bytes and bytes per parameter, after two steps that build the optimizer's state."""
    device = settings.torch_device
    measure.start_afresh(device)
    before = measure.allocated(device)
    running = contender.setup(Job(shape=shape, device=device, compile=settings.compile, optimizer=optimizer))
    data = models.batches(shape, BATCH, device, count=1)
    # torchao's optimizers compile themselves, which toy sizes do not wait for
    with nullcontext() if settings.compile else torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            running.step(data)
    found = {
        "weights": bytes_held.weights(running.bare),
        "optimizer": bytes_held.moments(running.optimizer),
        "masters": bytes_held.masters(running.optimizer, running.bare),
    }
    if settings.cuda:
        resting = measure.allocated(device) or 0
        found |= bytes_held.by_allocator(running, data[0], device)
        # caches, workspaces, buffers: whatever else stays allocated between steps
        found["other"] = resting - (before or 0) - found["weights"] - found["optimizer"] - found["masters"]
    else:
        found |= bytes_held.by_storage(running, data[0])
    parameters = sum(p.numel() for p in running.bare.parameters())
    tokens = BATCH * shape.sequence
    per_parameter = {name: size / parameters for name, size in found.items() if name != "activations"}
    state = sum(per_parameter[name] for name in STATE)
    return {
        "parameters": parameters, "tokens": tokens, "optimizer_name": optimizer, "bytes": found,
        "bytes_per_parameter": per_parameter, "state_bytes_per_parameter": state,
        "activation_bytes_per_token": found["activations"] / tokens, **measure.peak(device),
        "headline": f"{state:.2f} bytes per parameter, {found['activations'] / tokens / 1e3:.1f} kB per token",
    }  # fmt: skip
