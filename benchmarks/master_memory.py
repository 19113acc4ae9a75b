"""Measure the bytes per parameter of weights, gradients, masters and AdamW's moments, by precision.

    python -m benchmarks.master_memory [--out results.json]

A stack of linears trains for two steps under each precision, by Fabric on CPU. The bytes of all storages of the model
and the optimizer are counted: *at rest* between backward and step (with gradients; this decides whether a model
fits), and at the *peak* inside the optimizer's step. Temporaries of torch's own update are not counted, because every
foreach optimizer has them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec import recipes

WIDTH, DEPTH = 256, 8
PLUGINS = {
    "32-true": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-master": {"precision": "bf16-master"},
    "bf16-master, float32 gradients": {"plugins": recipes.bf16_mixed()},
    "bf16-remainder": {"precision": "bf16-remainder"},
    "bf16-sr": {"precision": "bf16-sr"},
    "fp16-master": {"precision": "fp16-master"},
}


def tensors_of(value: object) -> Iterable[Tensor]:
    """Yield every tensor in nested containers and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in (*value.keys(), *value.values()):
            yield from tensors_of(inner)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from tensors_of(inner)
    elif type(value).__module__.startswith("lightning_lowprec"):
        yield from tensors_of(vars(value))


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all storages that the model and the optimizer hold."""
    tensors = [*model.parameters(), *tensors_of(vars(optimizer))]
    tensors += [t.grad for t in tensors if t.grad is not None]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


class Peak(TorchDispatchMode):
    """Record the most bytes that are held after any operation."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer, self.bytes = model, optimizer, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, held(self.model, self.optimizer))
        return result


def measure(name: str) -> dict[str, float]:
    """Return the bytes per parameter of one precision."""
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", **PLUGINS[name])
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    count = sum(p.numel() for p in model.parameters())
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), foreach=True))
    batch = torch.randn(16, WIDTH)
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module(batch).pow(2).mean())
        rest = held(model, optimizer.optimizer)
        with Peak(model, optimizer.optimizer) as peak:
            optimizer.step()
    return {"rest": rest / count, "peak": peak.bytes / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    results = {name: measure(name) for name in PLUGINS}
    print(f"{'bytes per parameter':<32} {'at rest':>8} {'peak in step':>13}")
    for name, row in results.items():
        print(f"{name:<32} {row['rest']:>8.2f} {row['peak']:>13.2f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
