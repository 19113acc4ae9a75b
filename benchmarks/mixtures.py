"""Count what the blocks of a mixture of experts ask of a GPU: bytes beside the products, launches, waits.

    python -m benchmarks.ledger.launch python -m benchmarks.mixtures [--layers 2] [--json FILE]

Runs on the null GPU (benchmarks/ledger), with the CUDA build of torch. Forward and backward pass of two blocks each of
Mixtral-8x7B and of Qwen3-30B-A3B from transformers, without a head, 8,192 tokens, float32 weights; the optimizer's own
bytes are left out. A custom operation counts as one pass over what it takes and gives.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.gpu_lane.models import Shape
from benchmarks.gpu_lane.running import Job, Running
from benchmarks.ledger.entry import Amount
from benchmarks.ledger.step import measure
from lightning_lowprec import FP8TorchAO, HalfMixed

SEQUENCE, BATCH = 4096, 2
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128,
    },
}  # fmt: skip
PLUGINS: dict[str, Callable[[], Any]] = {
    "lightning bf16-mixed": lambda: None,
    "bf16": lambda: HalfMixed("auto"),
    "fp8-tensorwise, experts in bf16": lambda: FP8TorchAO(experts="bf16"),
    "fp8-tensorwise": FP8TorchAO,
    "fp8-rowwise": lambda: FP8TorchAO("rowwise"),
    "fp8-rowwise-gw-hp": lambda: FP8TorchAO("rowwise_with_gw_hp"),
}


class Body(nn.Module):
    """The blocks of a causal model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.model

    @property
    def layers(self) -> Any:
        return self.body.layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.body(input_ids=tokens, use_cache=False).last_hidden_state.float().mean()
        return loss


def set_up(make: Callable[[], Any], fields: dict[str, Any], layers: int, job: Job) -> Running:
    """Build the model, and set it up by Fabric; blocks are compiled for every contender."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields, num_hidden_layers=layers, vocab_size=1024)
    with torch.device(job.device):
        body = Body(AutoModelForCausalLM.from_config(config))
    plugin = make()
    options: dict[str, Any] = {"precision": "bf16-mixed"} if plugin is None else {"plugins": plugin}
    fabric = L.Fabric(accelerator="cuda", devices=1, **options)
    if not isinstance(plugin, FP8TorchAO):
        for block in body.layers:
            block.compile()
    wrapped: Any = fabric.setup(body)
    return Running(
        model=wrapped, bare=body, optimizer=torch.optim.SGD(body.parameters(), lr=1e-4), backward=fabric.backward
    )


def counted(name: str, fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return what one step asks for, per block."""
    shape = Shape(name="mixture", layers=layers, hidden=0, ffn=0, heads=1, kv_heads=1, vocab=1024, sequence=SEQUENCE)
    entry = measure(name, partial(set_up, PLUGINS[name], fields, layers), shape, batch=BATCH)
    total = Amount()
    for phase in ("forward", "backward"):
        for amount in entry.stretches[phase].values():
            total.add(amount)
    return {
        "GB": total.bytes / layers / 1e9,
        "launches": (total.kernels + total.copies) / layers,
        "products": total.products / layers,
        "waits": len(entry.waits),
        "graph breaks": sum(entry.graph_breaks.values()),
        "unknown": total.unknown_bytes / layers,
        "kernels": dict(Counter(entry.kernels).most_common(40)),
    }


def main() -> None:
    """Print a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for model, fields in MODELS.items():
        print(f"\n{model}, per block:  GB beside products  launches  products  waits per step  graph breaks")
        for name in PLUGINS:
            row = found.setdefault(model, {})[name] = counted(name, fields, chosen.layers)
            numbers = "  ".join(f"{row[key]:8.2f}" for key in ("GB", "launches", "products", "waits", "graph breaks"))
            print(f"{name:34} {numbers}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
