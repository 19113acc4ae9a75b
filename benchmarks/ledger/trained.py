r"""Count a step of a model under the Trainer, called as users call it: default config, tensors in, its own loss.

    LAUNCH=".venv-te/bin/python -m benchmarks.ledger.launch .venv-te/bin/python"
    $LAUNCH -m benchmarks.ledger.trained llama fp8-hybrid
    $LAUNCH -m benchmarks.ledger.trained gpt2 compiled fp8-hybrid

The user names a precision, and takes torch's fused AdamW. Each name is a row of a table. ``compiled`` is Lightning's
``bf16-mixed``, with every block compiled by the user; the other names compile the blocks by themselves or not at all.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ledger import own_moved, triton_bytes
from benchmarks.ledger.entry import OUTSIDE, PHASES, Amount, amounts, total
from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import Log, mark, recording
from benchmarks.ledger.step import mark_blocks
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals.models import SHAPES, Shape

WARM_STEPS = 4
COMPILED = "compiled"
"""Lightning's ``bf16-mixed`` with compiled blocks."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a step asks for."""

    kernels: int
    """Launches of kernels and of matrix products."""
    block_bytes: float
    """Read and written by forward and backward of a block, without matrix products and attention."""
    outside_bytes: int
    """The same of what is in no block: embedding, last norm, head and loss."""
    peak: int
    """The most bytes that torch had allocated during the step."""
    graphs: int
    waits: list[str]
    refused: list[str]
    loose: list[str]
    """Kernels of which nobody knows the bytes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what is passed to it."""

    name: str
    """With the sizes: compiled kernels are shared by cases of one name."""
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Sequence[Tensor]], Tensor]
    blocks: Callable[[Any], Sequence[nn.Module]]
    sample: tuple[Tensor, ...]
    """One sample of a batch."""
    batch: int


def _of_tokens(name: str, build: Callable[[], nn.Module], blocks: str, batch: int, sequence: int) -> Case:
    """A language model of transformers, which is passed tokens and labels."""
    return Case(
        name=f"{name} {sequence}",
        build=build,
        loss=lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
        blocks=lambda model: model.get_submodule(blocks),
        sample=(torch.zeros(sequence, dtype=torch.int64),),
        batch=batch,
    )


def llama(shape: Shape) -> Case:
    """Return a Llama of transformers, with the sizes of one of the ledger's stacks."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.sequence, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    return _of_tokens(
        f"llama {shape}", lambda: transformers.LlamaForCausalLM(config), "model.layers", 2, shape.sequence
    )


def _gpt2() -> Case:
    """GPT-2 as wide as its largest model (1,600), with 12 of its 48 blocks."""
    config = transformers.GPT2Config(n_embd=1600, n_head=25, n_layer=12, use_cache=False)
    return _of_tokens("gpt2", partial(transformers.GPT2LMHeadModel, config), "transformer.h", 8, 1024)


def _mixture() -> Case:
    """Mixtral with the sizes of its published model, and two of its 32 blocks."""
    config = transformers.MixtralConfig(num_hidden_layers=2)
    return _of_tokens("mixture", partial(transformers.MixtralForCausalLM, config), "model.layers", 2, 4096)


def _vit() -> Case:
    """ViT-L/16 of transformers on pictures of 224 x 224, with 12 of its 24 blocks."""
    config = transformers.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=12, num_labels=1000
    )
    return Case(
        name="vit",
        build=partial(transformers.ViTForImageClassification, config),
        loss=lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss,
        blocks=lambda model: [module for module in model.modules() if type(module).__name__ == "ViTLayer"],
        sample=(torch.zeros(3, 224, 224), torch.zeros((), dtype=torch.int64)),
        batch=64,
    )


def _encoder() -> Case:
    """Torch's own ``nn.TransformerEncoder``: 6 blocks of width 1,024, 8 x 1,024 tokens."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True)
    return Case(
        name="encoder",
        build=lambda: nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        blocks=lambda model: model.layers,
        sample=(torch.zeros(1024, 1024),),
        batch=8,
    )


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: llama(SHAPES["8b"]), "gpt2": _gpt2, "vit": _vit, "encoder": _encoder, "mixture": _mixture,
}  # fmt: skip


class _Task(L.LightningModule):
    def __init__(self, case: Case, compiled: bool) -> None:
        super().__init__()
        self.case = case
        with torch.device("cuda"):
            self.model = case.build()
        if compiled:
            for block in case.blocks(self.model):
                block.forward = torch.compile(block.forward)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        return self.case.loss(self.model, batch)

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
            mark_blocks(list(module.case.blocks(module.model)))
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


def measure(case: Case, precision: str) -> Row:
    """Train for a few steps under a name, or :data:`COMPILED`, and return the row of the last one."""
    triton_bytes.start(case.name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    step = _LastStep()
    trainer = L.Trainer(
        accelerator="cuda", devices=1, max_epochs=1, callbacks=[step], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        precision="bf16-mixed" if precision == COMPILED else precision,
    )  # fmt: skip
    samples = TensorDataset(*(one.expand(case.batch * (WARM_STEPS + 2), *one.shape) for one in case.sample))
    task = _Task(case, precision == COMPILED)
    blocks = len(case.blocks(task.model))
    trainer.fit(task, DataLoader(samples, batch_size=case.batch))
    found, loose = amounts(step.log.records, step.moved.operations, triton_bytes.KERNELS, triton_bytes.LAUNCHES)
    training = [found[phase] for phase in PHASES[:2]]
    inside = total(amount for parts in training for part, amount in parts.items() if part != OUTSIDE)
    outside = total(parts.get(OUTSIDE, Amount()) for parts in training)
    return Row(
        kernels=step.log.count("kernel", "gemm"),
        block_bytes=inside.bytes / blocks,
        outside_bytes=outside.bytes,
        peak=step.peak,
        graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        waits=[record.name for record in step.log.waits()],
        refused=[f"{record.name} {record.info}" for record in step.log.of("refused", "unknown")],
        loose=sorted(loose),
    )


HEAD = "| precision | kernels per step | graphs | GB per block | GB outside | peak GB | waits |" + "\n|" + 7 * "---|"


def main() -> None:
    """Print the rows of a model and of names, both from the command line."""
    torch.backends.cudnn.enabled = False  # the null GPU has none
    torch.backends.cuda.enable_cudnn_sdp(False)
    take_first_variant()
    print(HEAD)
    model, *names = sys.argv[1:]
    for name in names:
        row = measure(CASES[model](), name)
        assert (row.refused, row.loose) == ([], []), row
        cells = (row.block_bytes, row.outside_bytes, row.peak)
        sizes = " | ".join(f"{cell / 1e9:.2f}" for cell in cells)
        print(f"| {name} | {row.kernels} | {row.graphs} | {sizes} | {len(row.waits)} |", flush=True)


if __name__ == "__main__":
    main()
