r"""Count a step of a Llama of transformers under the Trainer, called as users call it.

    .venv-te/bin/python -m benchmarks.ledger.launch .venv-te/bin/python -m benchmarks.ledger.llama fp8-hybrid

The model has the sizes of the ledger's 8B stack, and transformers' own attention and loss. The user passes tokens and
labels, names a precision, and takes torch's fused AdamW. Each name is a row of a table.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ledger import own_moved, triton_bytes
from benchmarks.ledger.entry import OUTSIDE, PHASES, Amount, amounts, total
from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import Log, mark, recording
from benchmarks.ledger.step import mark_blocks
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals.models import SHAPES, Shape

BATCH, WARM_STEPS = 2, 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a step asks for."""

    kernels: int
    """Launches of kernels and of matrix products."""
    block_bytes: float
    """Read and written by forward and backward of a block, without matrix products and attention."""
    outside_bytes: int
    """The same of what is in no block: embedding, last norm, head and loss."""
    optimizer_bytes: int
    peak: int
    """The most bytes that torch had allocated during the step."""
    graphs: int
    waits: list[str]
    refused: list[str]
    loose: list[str]
    """Kernels of which nobody knows the bytes."""


class _Task(L.LightningModule):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.sequence, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )  # fmt: skip
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class _LastStep(L.Callback):
    """Record the last step, after one in which everything that is hooked for that has run once."""

    def __init__(self) -> None:
        self.stack, self.moved, self.peak = ExitStack(), Moved(), 0
        self.log = Log()
        self.runs = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_STEPS - 1:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        elif batch_idx == WARM_STEPS:
            self.peak = torch.cuda.max_memory_allocated()
            mark_blocks(list(module.model.model.layers))
            self.stack.callback(own_moved.watch(self.moved.from_outside))
        elif batch_idx == WARM_STEPS + 1:
            self.moved.operations.clear()
            triton_bytes.forget_launches()
            self.stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            self.log = self.stack.enter_context(recording())
            self.stack.enter_context(self.moved)
            self.runs = True
            mark("phase forward")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if self.runs:
            mark("phase backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.runs:
            mark("phase optimizer")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.runs:
            self.stack.close()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Leave nothing that the Trainer copies to the CPU, whose memory is real."""
        trainer.strategy.optimizers = []
        del module.model


def measure(shape: Shape, **chosen: Any) -> Row:
    """Train for a few steps under ``precision=`` or ``plugins=``, and return the row of the last one."""
    triton_bytes.start(f"llama {shape}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    step = _LastStep()
    trainer = L.Trainer(
        accelerator="cuda", devices=1, max_epochs=1, callbacks=[step], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **chosen,
    )  # fmt: skip
    tokens = torch.zeros(BATCH * (WARM_STEPS + 2), shape.sequence, dtype=torch.int64)
    trainer.fit(_Task(shape), DataLoader(tokens, batch_size=BATCH))  # type: ignore[arg-type]
    records = step.log
    found, loose = amounts(records.records, step.moved.operations, triton_bytes.KERNELS, triton_bytes.LAUNCHES)
    training = [found[phase] for phase in PHASES[:2]]
    blocks = total(amount for parts in training for part, amount in parts.items() if part != OUTSIDE)
    outside = total(parts.get(OUTSIDE, Amount()) for parts in training)
    return Row(
        kernels=records.count("kernel", "gemm"),
        block_bytes=blocks.bytes / shape.layers,
        outside_bytes=outside.bytes,
        optimizer_bytes=total(found["optimizer"].values()).bytes,
        peak=step.peak,
        graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        waits=[record.name for record in records.waits()],
        refused=[f"{record.name} {record.info}" for record in records.of("refused", "unknown")],
        loose=sorted(loose),
    )


def main() -> None:
    """Print the rows of the names on the command line."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has no cuDNN
    take_first_variant()
    print(
        "| precision | kernels per step | GB per block | GB outside of blocks | GB of the optimizer | peak GB | waits |"
    )
    print("|---" * 7 + "|")
    for name in sys.argv[1:]:
        row = measure(SHAPES["8b"], precision=name)
        assert (row.refused, row.loose) == ([], []), row
        cells = (row.block_bytes, row.outside_bytes, row.optimizer_bytes, row.peak)
        sizes = " | ".join(f"{cell / 1e9:.2f}" for cell in cells)
        print(f"| {name} | {row.kernels} | {sizes} | {len(row.waits)} |", flush=True)


if __name__ == "__main__":
    main()
